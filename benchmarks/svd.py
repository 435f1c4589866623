"""Time of approximate_svd against the number of non-zeros: `python benchmarks/svd.py [file.csv]`.

Sparse float32 matrices of one shape (100000 x 100000) with 1e5 to 1e7 non-zeros. Each is a sum of
σ_b u_b v_bᵀ with disjoint supports, the blocks shuffled over all rows and columns, so its singular
values are the σ_b and Δ_k is known. In turns with `torch.svd_lowrank` of the same rank with its
defaults (no oversampling, two power iterations: six products with the matrix); best of three.
"""

import csv
import sys
import time
from collections.abc import Callable

import torch
from torch import Tensor

import supportbasis as sb

SIDE, RANK, EPS, REPEATS = 100_000, 10, 0.5, 3
COUNTS = (100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)


def blocks(count: int) -> tuple[Tensor, Tensor]:
    """A matrix of ``count`` non-zeros in square blocks of norm 1/√b, and its singular values."""
    generator = torch.Generator().manual_seed(0)
    number = 1000
    edge = round((count / number) ** 0.5)
    sigma = torch.arange(1, number + 1, dtype=torch.float64).rsqrt()
    sides = []
    for _ in range(2):
        vectors = torch.randn(number, edge, generator=generator, dtype=torch.float64)
        places = torch.randperm(SIDE, generator=generator)[: number * edge].view(number, edge)
        sides.append((vectors / vectors.norm(dim=1, keepdim=True), places))
    (u, rows), (v, columns) = sides
    values = (sigma.view(-1, 1, 1) * u.unsqueeze(2) * v.unsqueeze(1)).flatten().float()
    index = torch.stack(torch.broadcast_tensors(rows.unsqueeze(2), columns.unsqueeze(1)))
    shape = (SIDE, SIDE)
    matrix = torch.sparse_coo_tensor(index.flatten(1), values, shape, check_invariants=False)
    return matrix.coalesce(), sigma


def error(a: Tensor, factors: tuple[Tensor, Tensor, Tensor]) -> float:
    """|A - L D Wᵀ|_F from |A|² - 2 Σ D_i L_iᵀ A W_i + Σ D_i², in float64."""
    left, values, right = (x.double() for x in factors)
    a = a.double()
    cross = ((a @ right) * left).sum(0) @ values
    return float((a.values().square().sum() - 2 * cross + values.square().sum()).sqrt())


def timed(call: Callable[[], tuple[Tensor, Tensor, Tensor]]) -> tuple[float, tuple[Tensor, ...]]:
    start = time.perf_counter()
    factors = call()
    return time.perf_counter() - start, factors


def main(path: str | None) -> None:
    rows = []
    for count in COUNTS:
        a, sigma = blocks(count)
        delta = float(sigma[RANK:].square().sum().sqrt())
        calls = {
            "approximate_svd": lambda a=a: sb.sketch.approximate_svd(a, RANK, EPS, 0),
            "torch.svd_lowrank": lambda a=a: torch.svd_lowrank(a, RANK),
        }
        best: dict[str, tuple[float, tuple[Tensor, ...]]] = {}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            for _ in range(REPEATS):
                for name, call in calls.items():
                    best[name] = min(best.get(name, (1e9, ())), timed(call), key=lambda x: x[0])
        for name, (seconds, factors) in best.items():
            row = {
                "what": name,
                "side": SIDE,
                "non_zeros": a.values().numel(),
                "rank": RANK,
                "eps": EPS,
                "seconds": f"{seconds:.4f}",
                "ns_per_non_zero": f"{1e9 * seconds / a.values().numel():.1f}",
                "error_over_delta": f"{error(a, factors) / delta:.4f}",
                "threads": torch.get_num_threads(),
                "torch": torch.__version__,
            }
            print(row)
            rows.append(row)
    if path:
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
