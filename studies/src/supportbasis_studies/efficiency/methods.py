"""What is timed in the study, beside SDPA and the mean of V."""

from __future__ import annotations

import torch
from torch import Tensor

from supportbasis.methods import Auto, Method, MultiThreshold, Polynomial, SingleThreshold

from ..comparison.measure import TimedCall
from ..comparison.settings import Setting

DEGREE = 2
SKETCH = 64
MATRIX_BYTES = 2**31  # of the paper's matrix A that are held at once

NAIVE = "exact, as the paper computes it"
SDPA = "SDPA"
MEAN = "mean(V)"
AS23_ENTRY = "AS23, entry bound"
AS23_NORM = "AS23, norm bound"
ONE_BEST = "one best polynomial"
SINGLE = "single threshold"
SINGLE_CHEBYSHEV = "single threshold, Chebyshev"
MULTI = f"multi-threshold, sketch {SKETCH}"
MULTI_PLAIN = "multi-threshold, no sketch"
AUTO = "Auto(1e-2)"
AUTO_FINE = "Auto(1e-3)"


def pieces(n: int) -> int:
    """Into how many groups of rows the paper's n × n matrix is cut."""
    return -(-4 * n * n // MATRIX_BYTES)


def naive(setting: Setting) -> TimedCall:
    """D⁻¹AV by Definition 1.1: the matrix A = exp(scale·QKᵀ), its row sums, one division.

    Nothing is subtracted from the scores before exp, as in the paper. Rows are taken in groups
    where A would not fit; the arithmetic is the same.
    """
    count = pieces(setting.n)

    def call() -> Tensor:
        outputs = []
        for query in setting.query.chunk(count, -2):
            weight = torch.exp(query @ setting.key.mT * setting.factor)
            outputs.append((weight @ setting.value) / weight.sum(-1, keepdim=True))
        return torch.cat(outputs, -2)

    ran = "exp(QKᵀ) in float32" + (f", in {count} groups of rows" if count > 1 else ", at once")
    return TimedCall(NAIVE, call, ran=ran)


def entry_bound(setting: Setting) -> float:
    """|scale|·d·max|Q|·max|K|: what entries alone say about the scores."""
    largest = [float(x.abs().max()) for x in (setting.query, setting.key)]
    return abs(setting.factor) * setting.dim * largest[0] * largest[1]


def line_methods(setting: Setting) -> dict[str, Method]:
    """Methods without a threshold to choose: horizontal lines in the figure."""
    return {
        AS23_ENTRY: Polynomial(DEGREE, entry_bound(setting)),
        AS23_NORM: Polynomial(DEGREE),
        ONE_BEST: Polynomial(DEGREE, polynomial="auto"),
        MULTI: MultiThreshold(2.0, 1, SKETCH),
        MULTI_PLAIN: MultiThreshold(2.0, 1),
        AUTO_FINE: Auto(1e-3),
        AUTO: Auto(1e-2),
    }


def map_methods() -> dict[str, Method]:
    """Methods of the map over lengths and scores."""
    return {
        AS23_NORM: Polynomial(DEGREE),
        SINGLE: SingleThreshold(degree=DEGREE),
        MULTI: MultiThreshold(2.0, 1, SKETCH),
        AUTO: Auto(1e-2),
    }
