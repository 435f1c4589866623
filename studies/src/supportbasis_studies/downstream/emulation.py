"""The paper's evaluation of its table, as the authors published it, and AS23 beside it.

All scores are formed. Those among the largest or the smallest 10 % of their head are
exponentiated; the others go through the Chebyshev series of exp, cut at a degree, on the interval
from the smallest to the largest of them in the sequence. AS23 puts all scores through the series.

The authors published this twice. In the first file negative values of the series are kept, and
weights of a row may cancel. In the revised one every row's largest score is subtracted from it
before anything is chosen, and the series is at least 1e-8.

No work is saved: degree 4 would need 814 385 features at head dim 64 to be anything but an
emulation. Causal heads, which the paper does not have, count only the scores that are allowed.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.polynomial import chebyshev
from torch import Tensor

from ..models import Attend, allowed

SHARE = 0.1  # of the scores, at either end
LEAST = 1e-8  # value of the series in the revised file
NODES = 256  # at which the series is computed; the published 4096 give the same numbers


def emulated(degree: int, share: float = SHARE, *, revised: bool = False) -> Attend:
    """Attention by this series; ``share`` 0 is AS23."""

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
        dtype = torch.promote_types(query.dtype, torch.float32)
        scores = (query.to(dtype) @ key.to(dtype).transpose(-1, -2)).mul_(scale)
        mask = allowed(query.shape[-2], key.shape[-2], query.device) if causal else None
        weights = emulated_weights(scores, mask, degree, share, revised=revised)
        return ((weights @ value.to(dtype)) / weights.sum(-1, keepdim=True)).to(query.dtype)

    return attend


def emulated_weights(
    scores: Tensor, mask: Tensor | None, degree: int, share: float, *, revised: bool = False
) -> Tensor:
    """What stands for exp(scores) up to a factor for each sequence (``revised``: for each row):
    [batch, heads, n, m].

    The factor of a sequence keeps exp from overflowing; the first published file has none.
    """
    if revised:
        scores = scores - _shown(scores, mask).amax(-1, keepdim=True)
    low, high = limits(scores, mask, share)
    start, end = low.amin(1, keepdim=True), high.amax(1, keepdim=True)  # one interval a sequence
    top = _shown(scores, mask).amax((1, 2, 3), keepdim=True)
    middle, half = (end + start) / 2, ((end - start) / 2).clamp(min=1e-6)
    position = ((scores - middle) / half).clamp_(-1, 1)
    weights = evaluate(position, series(half, degree, middle - top))
    if revised:
        weights.clamp_(min=LEAST)
    if share:
        outer = (scores <= low) | (scores >= high)
        weights = torch.where(outer, (scores - top).exp(), weights)
    return weights if mask is None else weights.masked_fill_(~mask, 0.0)


def limits(scores: Tensor, mask: Tensor | None, share: float) -> tuple[Tensor, Tensor]:
    """The scores of a head up to which, and from which on, they are exact: [batch, heads, 1, 1]."""
    flat = scores.flatten(-2) if mask is None else scores[..., mask]
    count = int(share * flat.shape[-1])
    if count < 1:
        return flat.amin(-1)[..., None, None], flat.amax(-1)[..., None, None]
    places = [count - 1, flat.shape[-1] - count]
    if flat.device.type == "cpu":  # numpy finds both at once, faster than two calls of kthvalue
        ordered = torch.from_numpy(np.partition(flat.detach().numpy(), places, -1))
    else:
        ordered = flat.sort(-1).values
    low, high = (ordered[..., place, None, None] for place in places)
    return low, high


def _shown(scores: Tensor, mask: Tensor | None) -> Tensor:
    """Scores of the pairs that are allowed, -inf elsewhere."""
    return scores if mask is None else scores.masked_fill(~mask, -math.inf)


def series(half: Tensor, degree: int, shift: Tensor) -> list[Tensor]:
    """Coefficients of the Chebyshev series of exp(shift + half · t) for t in [-1, 1]."""
    angle = math.pi * (torch.arange(NODES, dtype=torch.float64, device=half.device) + 0.5) / NODES
    values = (shift.double().unsqueeze(-1) + half.double().unsqueeze(-1) * angle.cos()).exp()
    means = [(values * (k * angle).cos()).mean(-1) for k in range(degree + 1)]
    return [mean if k == 0 else 2 * mean for k, mean in enumerate(means)]


def evaluate(t: Tensor, coefficients: list[Tensor]) -> Tensor:
    """The series at t, by Horner's rule in powers of t: few passes over all scores."""
    powers = [torch.zeros_like(coefficients[0]) for _ in coefficients]
    for k, coefficient in enumerate(coefficients):
        for power, factor in enumerate(chebyshev.cheb2poly([0] * k + [1])):
            powers[power] = powers[power] + factor * coefficient
    total = torch.zeros_like(t)
    for factors in reversed(powers):
        total.mul_(t).add_(factors.to(t.dtype))
    return total
