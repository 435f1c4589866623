"""A small sample of scores, on which the errors of polynomials are estimated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from ..polynomials.certified import CertifiedPolynomial, chebyshev, minimax, taylor
from ..problem.problem import Head

ROWS, KEYS = 64, 256
BUILDERS = {"taylor": taylor, "chebyshev": chebyshev, "minimax": minimax}


@dataclass(frozen=True, eq=False)
class ScoreSample:
    """Scores of sampled rows and keys in float64, with the keys' log-weights."""

    scores: Tensor  # [rows, keys]
    log_weight: Tensor  # [rows, keys]
    normalise: bool
    is_density: bool
    MULTIPLY_ADDS: ClassVar[int] = ROWS * KEYS

    @staticmethod
    def draw(head: Head, rows: Tensor | None, keys: Tensor | None, seed: int = 0) -> ScoreSample:
        row = pick(rows, head.n, ROWS, seed, head.query.device)
        key = pick(keys, head.m, KEYS, seed + 1, head.query.device)
        scores = head.query[row].double() @ head.key[key].double().T * head.scale
        log_weight = torch.zeros_like(scores)
        if head.key_log_weight is not None:
            log_weight += head.key_log_weight[key]
        if head.query_log_weight is not None:
            log_weight += head.query_log_weight[row].unsqueeze(1)
        return ScoreSample(scores, log_weight, head.normalise, head.is_density)

    def expected_error(self, poly: CertifiedPolynomial, power: int = 1) -> float:
        """Relative root-mean-square error of the weights poly(z / power)^power: of the output,
        for random values."""
        if not self.scores.numel():
            return 0.0
        top = (self.scores + self.log_weight).amax(1, keepdim=True)
        if not self.normalise:
            top = top.max()
        exact = (self.scores + self.log_weight - top).exp()
        given = poly(self.scores / power) * (poly.bound + (self.log_weight - top) / power).exp()
        given = given.pow_(power)
        if self.normalise:
            exact = exact / exact.sum(1, keepdim=True)
            given = given / given.sum(1, keepdim=True)
        error = ((given - exact).square().sum() / exact.square().sum()).sqrt()
        return float(error.nan_to_num(math.inf))


def pick(index: Tensor | None, total: int, count: int, seed: int, device: torch.device) -> Tensor:
    """At most ``count`` entries of an index set (None: all of 0..total), private randomness."""
    index = torch.arange(total, device=device) if index is None else index
    if len(index) <= count:
        return index
    generator = torch.Generator().manual_seed(seed)
    return index[torch.randint(len(index), (count,), generator=generator).to(device)]


def best_polynomial(
    sample: ScoreSample,
    degree: int,
    reach: float,
    epsilon: float = math.inf,
    power: int = 1,
    kind: str = "auto",
) -> CertifiedPolynomial:
    """Of Taylor, Chebyshev and relative minimax on [-reach, reach], the one of least expected
    error on the sample among those certified positive and, if epsilon is given, to epsilon; if
    there is none, the one of least certified error. With a power, of z / power on that range. A
    ``kind`` other than "auto" is taken as it is.

    The sum of a density has no denominator to lose: there any sign will do, and minimax, which
    weighs all scores equally, is left out unless epsilon is given.
    """
    if kind != "auto":
        return BUILDERS[kind](degree, reach)
    all_scores = sample.is_density and epsilon == math.inf
    builders = (taylor, chebyshev) if all_scores else BUILDERS.values()
    candidates = [build(degree, reach) for build in builders]
    usable = [p for p in candidates if (p.positive or sample.is_density) and p.error <= epsilon]
    if not usable:
        return min(candidates, key=lambda poly: poly.error)
    return min(usable, key=lambda poly: sample.expected_error(poly, power))
