"""Third part: the error of sketched powers, measured and predicted.

Let X = <phi(q), phi(k)> be the inner product of the half map, a Gaussian tree of size z; the
weight of a pair is X². With a = <g, q> and b = <g, k> for a Gaussian vector g, N = |q||k| and
c = <q, k>, the product ab has the cumulants

    kappa_r = 2^(r-1) (r-1)! [((N + c)/2)^r + (-(N - c)/2)^r].

At power 2, X is the mean of z independent copies of ab. At power 4 it is the mean of z products of
two independent copies, whose raw moments are the squares of those of ab. A mean of z copies has the
cumulants kappa_r / z^(r-1), which give E X² and E X⁴. For independent random values the squared
relative error of the output is then close to

    sum_ij E(X_ij² / Dbar_i - w_ij / D_i)² / sum_ij (w_ij / D_i)²,    Dbar_i = sum_j E X_ij².

E X² is not w but larger, by the variance of X: an error that falls with 1/z, not with its root.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from supportbasis import Result, attention
from supportbasis.methods import PowerAttention
from supportbasis.sketch import PolySketch

from ..comparison.settings import Setting
from ..progress import Tick
from ..statistics import log_slope
from .inputs import Extent, normal

DIM = 32
POWERS = (2, 4)
ROWS = 512  # sampled for predictions and inner products
BEYOND = tuple(2**i for i in range(4, 17))  # sizes at which the prediction alone is drawn

Moments = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class SketchedPower:
    """`PowerAttention` with a sketch against without, for one power, size and sketch seed."""

    power: int
    sketch_size: int
    seed: int
    n: int
    d: int
    output_l2: float
    output_predicted: float
    inner_l2: float  # the same for the inner products X, before they are squared
    inner_predicted: float
    failed_rows: int


def measure_sketch(extent: Extent, first_seed: int, tick: Tick) -> list[SketchedPower]:
    """All powers, sizes and seeds, on Gaussian entries of variance 1."""
    setting = normal(extent.sketch_length, DIM, 1.0, first_seed)
    rows: list[SketchedPower] = []
    count = len(POWERS) * len(extent.sketch_sizes) * extent.sketch_seeds
    for power in POWERS:
        exact = dense_power(setting, power)
        pairs = Pairs.of(setting)
        for size in extent.sketch_sizes:
            expected = pairs.output_error(power, size), pairs.inner_error(power, size)
            for seed in range(extent.sketch_seeds):
                method = PowerAttention(power, size, first_seed + seed)
                rows.append(_row(setting, method, exact, pairs, expected))
                tick(len(rows) / count)
    return rows


def _row(
    setting: Setting,
    method: PowerAttention,
    exact: Tensor,
    pairs: Pairs,
    expected: tuple[float, float],
) -> SketchedPower:
    assert method.sketch_size is not None
    tensors = (setting.query, setting.key, setting.value)
    result = attention(*tensors, method=method, return_result=True)
    assert isinstance(result, Result)
    error = float((result.output[0, 0].double() - exact).norm() / exact.norm())
    return SketchedPower(
        power=method.power,
        sketch_size=method.sketch_size,
        seed=method.seed,
        n=setting.n,
        d=setting.dim,
        output_l2=error,
        output_predicted=expected[0],
        inner_l2=pairs.measured_inner(method),
        inner_predicted=expected[1],
        failed_rows=int(result.certificate.fallback_rows.sum()),
    )


def dense_power(setting: Setting, power: int) -> Tensor:
    """D^-1 (Q K^T)^power V as it is written down, in float64."""
    query, key, value = (x[0, 0].double() for x in (setting.query, setting.key, setting.value))
    outputs = []
    for chunk in query.split(ROWS):
        weight = (chunk @ key.T).pow_(power)
        outputs.append(weight @ value / weight.sum(1, keepdim=True))
    return torch.cat(outputs)


# ---- the prediction --------------------------------------------------------------------------


class Pairs(NamedTuple):
    """Sampled queries and all keys, with their inner products and products of norms."""

    query: Tensor
    key: Tensor
    inner: Tensor  # c
    norms: Tensor  # N

    @staticmethod
    def of(setting: Setting) -> Pairs:
        query, key = setting.query[0, 0, :ROWS].double(), setting.key[0, 0].double()
        norms = query.norm(dim=1).unsqueeze(1) * key.norm(dim=1)
        return Pairs(query, key, query @ key.T, norms)

    def moments(self, power: int, size: int) -> Moments:
        """E X, E X², E X³, E X⁴ of every pair."""
        term = product_cumulants(self.norms, self.inner)
        if power == 4:
            one, two, three, four = raw_moments(term)
            term = cumulants((one * one, two * two, three * three, four * four))
        one, two, three, four = term
        return raw_moments((one, two / size, three / size**2, four / size**3))

    def output_error(self, power: int, size: int) -> float:
        """Predicted relative error of the output for independent random values."""
        _, two, _, four = self.moments(power, size)
        exact = self.inner.pow(power)
        exact /= exact.sum(1, keepdim=True)
        total = two.sum(1, keepdim=True)
        square = four / total**2 - 2 * exact * two / total + exact**2
        return math.sqrt(float(square.sum() / exact.square().sum()))

    def inner_error(self, power: int, size: int) -> float:
        """Predicted relative Frobenius error of X as an estimate of c^(power/2)."""
        one, two, _, _ = self.moments(power, size)
        return math.sqrt(float((two - one**2).sum() / one.square().sum()))

    def measured_inner(self, method: PowerAttention) -> float:
        """The same of one sketch."""
        assert method.sketch_size is not None
        half = PolySketch(method.power, method.sketch_size, method.seed).half
        exact = self.inner.pow(method.power // 2)
        return float((half(self.query) @ half(self.key).T - exact).norm() / exact.norm())


def product_cumulants(norms: Tensor, inner: Tensor) -> Moments:
    """Cumulants 1 to 4 of ab for Gaussian a, b with E a² E b² = N² and E ab = c.

    >>> one = torch.ones(1)  # a = b: chi-square with one degree of freedom
    >>> [float(x) for x in product_cumulants(one, one)]
    [1.0, 2.0, 8.0, 48.0]
    """
    up, down = (norms + inner) / 2, (inner - norms) / 2
    factors = (1, 2, 8, 48)  # 2^(r-1) (r-1)!
    one, two, three, four = (f * (up**r + down**r) for r, f in enumerate(factors, 1))
    return one, two, three, four


def raw_moments(cumulant: Moments) -> Moments:
    """E X^r from the cumulants, r up to 4."""
    one, two, three, four = cumulant
    return (
        one,
        two + one**2,
        three + 3 * two * one + one**3,
        four + 4 * three * one + 3 * two**2 + 6 * two * one**2 + one**4,
    )


def cumulants(moment: Moments) -> Moments:
    """The inverse of `raw_moments`."""
    one, two, three, four = moment
    return (
        one,
        two - one**2,
        three - 3 * two * one + 2 * one**3,
        four - 4 * three * one - 3 * two**2 + 12 * two * one**2 - 6 * one**4,
    )


# ---- over seeds ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Decay:
    """How the error of one power falls with the size of its sketch."""

    power: int
    sizes: tuple[int, ...]
    measured: tuple[float, ...]  # root mean square over seeds
    predicted: tuple[float, ...]
    inner_measured: tuple[float, ...]
    inner_predicted: tuple[float, ...]
    beyond: tuple[tuple[int, float], ...]  # predictions for sizes that nobody would run

    @property
    def slopes(self) -> tuple[float, float]:
        """Of the measured and of the predicted error."""
        return log_slope(self.sizes, self.measured), log_slope(self.sizes, self.predicted)

    @property
    def inner_slopes(self) -> tuple[float, float]:
        measured, predicted = self.inner_measured, self.inner_predicted
        return log_slope(self.sizes, measured), log_slope(self.sizes, predicted)

    def ratio(self, size: int) -> float:
        """Measured over predicted."""
        at = self.sizes.index(size)
        return self.measured[at] / self.predicted[at]


def decays(rows: Sequence[SketchedPower], extent: Extent, first_seed: int) -> list[Decay]:
    """One line for each power."""
    pairs = Pairs.of(normal(extent.sketch_length, DIM, 1.0, first_seed))
    made = []
    for power in dict.fromkeys(row.power for row in rows):
        groups = [
            [row for row in rows if (row.power, row.sketch_size) == (power, size)]
            for size in extent.sketch_sizes
        ]
        made.append(
            Decay(
                power,
                extent.sketch_sizes,
                tuple(_rms([row.output_l2 for row in group]) for group in groups),
                tuple(group[0].output_predicted for group in groups),
                tuple(_rms([row.inner_l2 for row in group]) for group in groups),
                tuple(group[0].inner_predicted for group in groups),
                tuple((size, pairs.output_error(power, size)) for size in BEYOND),
            )
        )
    return made


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(value**2 for value in values) / len(values))
