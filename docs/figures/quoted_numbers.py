"""Print the numbers that docs/guarantees.md quotes: ``python docs/figures/quoted_numbers.py``.

Everything is dense float64 torch, on purpose independent of the library.
"""

import math

import torch

SIGMA, DIM, SEED = 0.1, 64, 0


def gaussian_tokens(n: int) -> list[torch.Tensor]:
    """The paper's efficiency experiment, Q and K ~ N(0, 0.1²), d = 64; V, not stated, likewise."""
    generator = torch.Generator().manual_seed(SEED)
    return [SIGMA * torch.randn(n, DIM, dtype=torch.float64, generator=generator) for _ in range(3)]


def softmax_with(weights: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return weights @ value / weights.sum(1, keepdim=True)


def interpolate(z: torch.Tensor, bound: float, degree: int) -> torch.Tensor:
    """Chebyshev interpolation of exp on [-bound, bound]."""
    k = torch.arange(degree + 1, dtype=torch.float64)
    nodes = torch.cos(torch.pi * (k + 0.5) / (degree + 1))
    coefficients = torch.linalg.solve(torch.linalg.vander(nodes), (bound * nodes).exp())
    result = torch.zeros_like(z)
    for coefficient in coefficients.flip(0):
        result = result * (z / bound) + coefficient
    return result


def error(output: torch.Tensor, exact: torch.Tensor, value: torch.Tensor) -> str:
    entry = ((output - exact).abs().max() / value.abs().max()).item()
    frobenius = ((output - exact).norm() / exact.norm()).item()
    return f"max|error|/max|V| {entry:.1e}, relative Frobenius {frobenius:.1e}"


def easy_regime(n: int = 8192) -> None:
    query, key, value = gaussian_tokens(n)
    scale = DIM**-0.5
    scores = scale * query @ key.T
    exact = softmax_with(scores.exp(), value)
    largest = max(query.abs().max().item(), key.abs().max().item())
    by_norm = scale * query.norm(dim=1).max().item() * key.norm(dim=1).max().item()
    by_entry = scale * DIM * largest**2
    print(f"n={n}: largest entry {largest:.2f}, sqrt(ln n) {math.sqrt(math.log(n)):.2f}")
    print(f"  score standard deviation {scores.std().item():.4f}")
    print("  mean(V):", error(value.mean(0).expand_as(exact), exact, value))
    for name, bound in (("entries", by_entry), ("norms", by_norm)):
        output = softmax_with(interpolate(scores, bound, 2), value)
        print(f"  Chebyshev degree 2, B={bound:.3f} by {name}:", error(output, exact, value))
    taylor = softmax_with(1 + scores + scores**2 / 2, value)
    print("  Taylor degree 2:", error(taylor, exact, value))


def exact_share() -> None:
    for threshold in (0.2, 0.3, 0.35, 0.4):
        small_entry = math.erf(threshold / SIGMA / math.sqrt(2))
        print(f"T={threshold}: expected share of exact pairs {1 - small_entry ** (2 * DIM):.1%}")


def literal_split(n: int = 1024, threshold: float = 0.35) -> None:
    """Algorithm 3 as printed (entrywise split, exp(A^(L)) - 1) against disjoint rectangles."""
    query, key, value = gaussian_tokens(n)
    scale = DIM**-0.5
    scores = scale * query @ key.T
    exact = softmax_with(scores.exp(), value)
    small_q, small_k = query * (query.abs() <= threshold), key * (key.abs() <= threshold)
    small = scale * small_q @ small_k.T
    large = torch.where((scores - small).abs() > 1e-15, scores, 0.0)
    taylor = 1 + small + small**2 / 2
    print(f"n={n}, T={threshold}, Taylor degree 2")
    print("  as printed:", error(softmax_with(taylor + large.exp() - 1, value), exact, value))
    rows = (query.abs() > threshold).any(1)[:, None] | (key.abs() > threshold).any(1)[None]
    disjoint = torch.where(rows, scores.exp(), 1 + scores + scores**2 / 2)
    print("  disjoint rectangles:", error(softmax_with(disjoint, value), exact, value))


def power_is_not_softmax(n: int = 2048, spread: float = 0.3) -> None:
    generator = torch.Generator().manual_seed(SEED)
    query, key, value = (
        torch.randn(n, DIM, dtype=torch.float64, generator=generator) for _ in range(3)
    )
    scores = spread * query @ key.T / math.sqrt(DIM)
    exact = softmax_with(scores.exp(), value)
    print(f"score standard deviation {scores.std().item():.2f}")
    print("  (q·k)²:", error(softmax_with(scores**2, value), exact, value))
    print("  mean(V):", error(value.mean(0).expand_as(exact), exact, value))


if __name__ == "__main__":
    easy_regime()
    exact_share()
    literal_split()
    power_is_not_softmax()
