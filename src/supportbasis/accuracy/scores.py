"""A small sample of scores, on which the errors of polynomials are estimated."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..polynomials.certified import KINDS, CertifiedPolynomial, built
from ..problem.problem import Head

ROWS, KEYS = 64, 256
SAMPLED_SCORES = ROWS * KEYS


def expected_error(
    head: Head, rows: Tensor | None, keys: Tensor | None, poly: CertifiedPolynomial, power: int = 1
) -> float:
    """Relative root-mean-square error of the weights poly(z / power)^power of these rows and keys
    (None: all) on a sample of them, in float64: of the output, for random values."""
    row, key = _pick(rows, head.query, ROWS, 0), _pick(keys, head.key, KEYS, 1)
    scores = head.query[row].double() @ head.key[key].double().T * head.scale
    if not scores.numel():
        return 0.0
    log_weight = head.log_weights(torch.float64)[key].expand_as(scores)
    if head.query_log_weight is not None:
        log_weight = log_weight + head.query_log_weight[row].unsqueeze(1)
    total = scores + log_weight
    top = total.amax(1, keepdim=True) if head.normalise else total.max()
    exact = (total - top).exp()
    unit = (poly.bound + (log_weight - top) / power).exp()
    given = (poly(scores / power) * unit).pow_(power)
    if head.normalise:
        exact = exact / exact.sum(1, keepdim=True)
        given = given / given.sum(1, keepdim=True)
    error = (given - exact).square().sum() / exact.square().sum()
    return float(error.sqrt().nan_to_num(math.inf))


def _pick(index: Tensor | None, tokens: Tensor, count: int, seed: int) -> Tensor:
    """At most ``count`` entries of an index set (None: all tokens), private randomness."""
    index = torch.arange(len(tokens), device=tokens.device) if index is None else index
    if len(index) <= count:
        return index
    generator = torch.Generator().manual_seed(seed)
    return index[torch.randint(len(index), (count,), generator=generator).to(index.device)]


def best_polynomial(
    head: Head, rows: Tensor | None, keys: Tensor | None, degree: int, reach: float,
    epsilon: float = math.inf, power: int = 1, kind: str = "auto",
) -> CertifiedPolynomial:  # fmt: skip
    """Of Taylor, Chebyshev and relative minimax on [-reach, reach], the one of least expected
    error for these rows and keys among those certified positive and, if epsilon is given, to
    epsilon; if there is none, the one of least certified error. With a power, of z / power on that
    range. A ``kind`` other than "auto" is taken as it is.

    The sum of a density has no denominator to lose: there any sign will do, and minimax, which
    weighs all scores equally, is left out unless epsilon is given.
    """
    if kind != "auto":
        return built(kind, degree, reach)
    any_sign = head.is_density
    kinds = KINDS[:2] if any_sign and epsilon == math.inf else KINDS
    candidates = [built(kind, degree, reach) for kind in kinds]
    if usable := [p for p in candidates if (p.positive or any_sign) and p.error <= epsilon]:
        return min(usable, key=lambda poly: expected_error(head, rows, keys, poly, power))
    return min(candidates, key=lambda poly: poly.error)
