"""What is timed: one entry for each row of the table, and the sweeps over lengths."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from supportbasis.methods import Exact, FittedPolynomial, Method, Polynomial, SingleThreshold

PAPER = 0.1  # standard deviation of entries in the paper's setting
SIGMA03 = 0.3**0.5  # of entries whose scores have standard deviation 0.3
LONG, MILLION = 131072, 2**20
OUTLIER_SHARE, OUTLIER_FACTOR = 0.01, 20.0

Inputs = Callable[[int, int, int], tuple[Tensor, Tensor, Tensor]]  # heads, n, d


@dataclass(frozen=True)
class Case:
    """A method on some inputs with a plan given; ``limit`` is the error it may have."""

    name: str
    method: Method
    inputs: Inputs
    n: int
    d: int
    heads: int = 8
    causal: bool = False
    backward: bool = False
    graph: bool = False  # timed as replays of a captured graph
    limit: float = 3e-3
    implementation: str = "auto"
    baseline_n: int = 0  # SDPA is timed at this length and scaled by (n / baseline_n)^2

    @property
    def unit(self) -> str:
        """Its name in the CSV."""
        flags = [
            word
            for word, said in (
                ("causal", self.causal), ("backward", self.backward), ("graph", self.graph)
            )
            if said
        ]  # fmt: skip
        return "-".join([self.name, f"h{self.heads}", f"n{self.n}", f"d{self.d}", *flags])


def gaussian(spread: float) -> Inputs:
    """Entries of queries and keys from N(0, spread²), values from N(0, 1), bfloat16."""

    def make(heads: int, n: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator("cuda").manual_seed(0)
        q, k, v = (_normal(heads, n, d, size, generator) for size in (spread, spread, 1.0))
        return q, k, v

    return make


def outliers(heads: int, n: int, d: int) -> tuple[Tensor, Tensor, Tensor]:
    """The paper's setting with 1 % of the queries and of the keys 20 times as long."""
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (_normal(heads, n, d, size, generator) for size in (PAPER, PAPER, 1.0))
    for x in (q, k):
        count = round(OUTLIER_SHARE * n)
        for head in x[0]:
            chosen = torch.randperm(n, device="cuda", generator=generator)[:count]
            head[chosen] *= OUTLIER_FACTOR
    return q, k, v


def _normal(heads: int, n: int, d: int, size: float, generator: torch.Generator) -> Tensor:
    x = torch.empty(1, heads, n, d, dtype=torch.bfloat16, device="cuda")
    for head in x[0]:  # a million tokens in float32 at once would be large
        head.copy_(torch.randn(n, d, device="cuda", generator=generator) * size)
    return x


DEGREE1, DEGREE2 = Polynomial(1, bound=0.5), Polynomial(2, bound=0.5)
SINGLE, FITTED = SingleThreshold(0.9, 2), FittedPolynomial(2400)
easy, harder = gaussian(PAPER), gaussian(SIGMA03)

CASES = [
    Case("degree 2", DEGREE2, easy, LONG, 64),
    Case("degree 2, scores of σ=0.3", Polynomial(2, bound=0.7), harder, LONG, 64, limit=2e-2),
    Case("degree 2", DEGREE2, easy, LONG, 128),
    Case("degree 2, scores of σ=0.3", Polynomial(2, bound=0.7), harder, LONG, 128, limit=2e-2),
    Case("degree 2", DEGREE2, easy, LONG, 64, causal=True),
    Case("degree 2", DEGREE2, easy, LONG, 128, causal=True),
    Case("degree 2", DEGREE2, easy, 65536, 64, causal=True, backward=True),
    Case("degree 2", DEGREE2, easy, 65536, 64, backward=True),
    Case("degree 1", DEGREE1, easy, LONG, 64),
    Case("degree 1", DEGREE1, easy, LONG, 64, graph=True),
    Case("degree 2", DEGREE2, easy, MILLION, 64, baseline_n=LONG),
    Case("single threshold, 1 % large", SINGLE, outliers, LONG, 64),
    Case("single threshold, 1 % large", SINGLE, outliers, LONG, 64, causal=True),
    Case("single threshold, 1 % large", SINGLE, outliers, LONG, 128),
    Case("single threshold, 1 % large", SINGLE, outliers, 65536, 64, backward=True),
    Case("fitted, 2400 features, σ=0.3", FITTED, harder, LONG, 64, limit=2e-2),
    Case("fitted, 2400 features, σ=0.3", FITTED, harder, LONG, 64, backward=True, limit=2e-2),
    Case("exact", Exact(), easy, 32768, 64, implementation="triton"),
]

CROSSOVER = [
    Case("crossover, degree 2", DEGREE2, easy, n, 64, heads=16, graph=True)
    for n in (2048, 4096, 8192, 16384, 32768)
]


def sweep(lengths: tuple[int, ...]) -> list[Case]:
    """Time against length: what the picture shows."""
    return [
        Case(f"sweep, degree {degree}", method, easy, n, d, causal=causal, backward=backward)
        for d in (64, 128)
        for backward in (False, True)
        for causal in (False, True)
        for degree, method in ((2, DEGREE2), (1, DEGREE1))
        for n in lengths
    ]
