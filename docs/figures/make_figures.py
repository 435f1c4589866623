"""Draw the figures of the documentation: ``python docs/figures/make_figures.py``."""

from pathlib import Path

import matplotlib
import torch

matplotlib.use("Agg")
import matplotlib.pyplot as plt

HERE = Path(__file__).parent
INK, GREY = "#1b1f24", "#8a9099"
DEGREES = {1: "#c46a1b", 2: "#2a7f62", 4: "#2b5fb3"}


def chebyshev_interpolant(z: torch.Tensor, bound: float, degree: int) -> torch.Tensor:
    """Values at z of the polynomial that meets exp at the Chebyshev points of [-bound, bound]."""
    k = torch.arange(degree + 1, dtype=torch.float64)
    nodes = bound * torch.cos(torch.pi * (k + 0.5) / (degree + 1))
    coefficients = torch.linalg.solve(torch.linalg.vander(nodes / bound), nodes.exp())
    powers = torch.linalg.vander(z.flatten() / bound, N=degree + 1)
    return (powers @ coefficients).reshape(z.shape)


def polynomial_method(n: int = 200, bound: float = 4.0) -> None:
    """Singular values of exp(qkᵀ) and of p(qkᵀ), one-dimensional tokens, float64."""
    generator = torch.Generator().manual_seed(0)
    q, k = (2 * torch.rand(2, n, dtype=torch.float64, generator=generator) - 1) * bound**0.5
    scores = torch.outer(q, k)
    index = torch.arange(1, n + 1)
    figure, axes = plt.subplots(figsize=(6.6, 3.8), layout="constrained")
    curves = [("exp(z)", scores.exp(), INK)]
    curves += [
        (f"p(z), degree {g}: rank {g + 1}", chebyshev_interpolant(scores, bound, g), colour)
        for g, colour in DEGREES.items()
    ]
    for label, matrix, colour in curves:
        values = torch.linalg.svdvals(matrix)
        axes.plot(index, values / values[0], "o-", color=colour, label=label, ms=4, lw=1.2)
    epsilon = torch.finfo(torch.float64).eps
    axes.axhline(epsilon, color=GREY, lw=1, ls="--")
    axes.text(24.4, epsilon * 1.6, "float64 rounding", ha="right", va="bottom", color=GREY, size=9)
    axes.set(yscale="log", xlim=(0.5, 24.5), ylim=(1e-18, 5), xlabel="index")
    axes.set_ylabel("singular value / largest")
    axes.set_title(f"n = {n} tokens, d = 1, scores z = qk in [−{bound:g}, {bound:g}]", size=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=9, loc="upper right")
    figure.savefig(HERE / "polynomial-method.png", dpi=160, facecolor="white")
    plt.close(figure)


if __name__ == "__main__":
    polynomial_method()
