"""Error, time and rank of the attention-loss gradient: `python benchmarks/gradient.py [file.csv]`.

One head of width 16 over tokens of width 64: float32, W a pair (W_Q, W_K), one token in a hundred
four times as large, the target from a teacher with other weights. Errors are relative (Frobenius),
against the closed form with exact weights in float64; times are the best of two (at the longest
length of one), with the exact method of the library in the same run beside them. The last rows cut
the exact part to rank k; Δ_k comes from its dense SVD.
"""

import csv
import sys
import time

import torch
from torch import Tensor

import supportbasis as sb
from supportbasis.gradient import AttentionLossGradient, attention_loss_gradient

DIM, HEAD, THRESHOLD = 64, 16, 3.0
LENGTHS = (2048, 8192, 32768)
CHECKED = 8192  # the longest length at which float64 is affordable
RANK_LENGTH, RANKS = 2048, (1, 4, 16, 64, 128)


def problem(n: int) -> dict[str, Tensor | tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, DIM, generator=generator)
    x[torch.randperm(n, generator=generator)[: n // 100]] *= 4
    draws = [torch.randn(DIM, HEAD, generator=generator) for _ in range(6)]
    pair, teacher = [y / (2 * DIM**0.5) for y in draws[:2]], [y / DIM**0.5 for y in draws[2:4]]
    weight_v, teacher_v = (y / DIM**0.5 for y in draws[4:])
    query, key, value = (x @ y for y in (*teacher, teacher_v))
    target = torch.nn.functional.scaled_dot_product_attention(query[None], key[None], value[None])
    return {"x": x, "weight_qk": tuple(pair), "weight_v": weight_v, "target": target[0]}


def call(data: dict, method: object, **settings: object) -> tuple[float, AttentionLossGradient]:
    seconds = []
    for _ in range(2 if len(data["x"]) <= CHECKED else 1):
        start = time.perf_counter()
        result = attention_loss_gradient(**data, scale=None, method=method, **settings)
        seconds.append(time.perf_counter() - start)
    return min(seconds), result


def widened(data: dict) -> dict:
    pair = tuple(y.double() for y in data["weight_qk"])
    return {name: y.double() for name, y in data.items() if name != "weight_qk"} | {
        "weight_qk": pair
    }


def errors(result: AttentionLossGradient, exact: AttentionLossGradient | None) -> dict[str, str]:
    row = {}
    for name in ("loss", "weight_qk", "weight_v", "x"):
        if exact is not None and getattr(result, name) is not None:
            ours, theirs = getattr(result, name).double(), getattr(exact, name)
            row[f"{name}_error"] = f"{float((ours - theirs).norm() / theirs.norm()):.2e}"
    return row


def lengths() -> list[dict[str, object]]:
    rows = []
    methods = (sb.Exact(), *(sb.SingleThreshold(THRESHOLD, degree) for degree in (1, 2, 3)))
    for n in LENGTHS:
        data = problem(n)
        exact = None
        if n <= CHECKED:
            exact = attention_loss_gradient(**widened(data), scale=None, method=sb.Exact())
        for inputs in (True, False):
            baseline = None
            for method in (*methods, sb.Polynomial(2)):
                seconds, result = call(data, method, input_gradient=inputs)
                baseline = baseline or seconds
                rows.append(
                    {
                        "method": str(method),
                        "n": n,
                        "input_gradient": inputs,
                        "seconds": f"{seconds:.3f}",
                        "times_exact": f"{baseline / seconds:.2f}",
                        "rows_error": f"{result.error.rows:.2e}",
                        **errors(result, exact),
                    }
                )
                print(rows[-1], flush=True)
    return rows


def ranks() -> list[dict[str, object]]:
    """Gradient error against the rank of the exact part."""
    data, method = problem(RANK_LENGTH), sb.SingleThreshold(THRESHOLD, 2)
    exact = attention_loss_gradient(**widened(data), scale=None, method=sb.Exact())
    values = torch.linalg.svdvals(exact_part(data, method))
    rows = []
    for k in (None, *RANKS):
        seconds, result = call(data, method, low_rank=k)
        row = {"method": str(method), "n": RANK_LENGTH, "input_gradient": True, "low_rank": k}
        row |= {"seconds": f"{seconds:.3f}", "rows_error": f"{result.error.rows:.2e}"}
        if result.low_rank is not None:
            row["residual"] = f"{result.low_rank.residual:.3e}"
            row["best_residual"] = f"{float(values[k:].norm() / values.norm()):.3e}"
        rows.append(row | errors(result, exact))
        print(rows[-1], flush=True)
    return rows


def exact_part(data: dict, method: sb.SingleThreshold) -> Tensor:
    """The exact weights of the plan, divided by the sums of their rows, in float64."""
    x, (left, right) = data["x"].double(), data["weight_qk"]
    query, key = x @ left.double(), x @ right.double()
    weights = (query @ key.T * HEAD**-0.5).softmax(1)
    large = [y.abs().amax(1) > method.threshold for y in (query, key)]
    return weights * (large[0].unsqueeze(1) | large[1])


def main(path: str | None) -> None:
    rows = [*lengths(), *ranks()]
    for row in rows:
        row |= {"threads": torch.get_num_threads(), "torch": torch.__version__}
    if path:
        names = list(dict.fromkeys(name for row in rows for name in row))
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, names)
            writer.writeheader()
            writer.writerows(rows)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
