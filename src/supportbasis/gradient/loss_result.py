"""What the gradient of the attention loss returns, and how wrong it is on sampled rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from ..accuracy.certificate import CONFIDENCE, SAMPLED_ROWS
from ..accuracy.sampling import RowSample
from ..errors import InputError
from ..plans import Plan
from ..problem.problem import Head
from .closed_form import Call, row_gradients


@dataclass(frozen=True)
class LowRankPart:
    """The exact part B of the weights, and the rank-k matrix that replaced it.

    ``residual`` is |B - L D Wᵀ|_F / |B|_F: at least Δ_k/|B|_F, and below 1 + eps times that with
    the probability of `sb.sketch.approximate_svd`. 0 where there is no exact part."""

    rank: int
    non_zeros: int
    residual: float

    def __str__(self) -> str:
        return f"{self.non_zeros} exact weights as rank {self.rank}, residual {self.residual:.3g}"


@dataclass(frozen=True)
class GradientError:
    """Relative Frobenius errors on sampled rows, and upper limits for all rows.

    ``output`` is the error of Â X Y. ``rows`` is that of (Â∘𝒬 - diag(r) Â) X, one vector a row,
    whose products with the tokens add up to ∂L/∂W."""

    output: float
    output_limit: float
    rows: float
    rows_limit: float
    sampled: int
    confidence: float

    def __str__(self) -> str:
        return (
            f"error of the output {self.output:.3g} (below {self.output_limit:.3g}), of the "
            f"gradient's rows {self.rows:.3g} (below {self.rows_limit:.3g}) with confidence "
            f"{self.confidence:g}, {self.sampled} rows"
        )


@dataclass(frozen=True, eq=False)
class AttentionLossGradient:
    """The loss |ÂXY - E|²_F, its gradients under the names of the arguments, and what ran."""

    loss: Tensor | None  # None: the gradient came from above
    weight_qk: Tensor | None  # ∂L/∂W [d, d]; None: of a pair of several heads, causal or from above
    weight_q: Tensor | None  # ∂L/∂W_Q and ∂L/∂W_K [d, h], where W came as a pair
    weight_k: Tensor | None
    weight_v: Tensor  # ∂L/∂Y [d, dv]
    x: Tensor | None  # ∂L/∂X [n, d]; None where it was not asked for
    output: Tensor  # ÂXY [n, dv]
    plan: Plan
    # rows whose polynomial weights do not add up to a usable sum, of which so many were computed
    # exactly; the others have output 0 (None: not counted, of several heads, causal ones and
    # gradients from above; warned about)
    invalid_rows: int | None = None
    fallback_rows: int | None = None
    low_rank: LowRankPart | None = None
    _call: Call | None = None
    _head: Head | None = None
    _rows: Tensor | None = None  # (Â∘𝒬 - diag(r) Â) X

    @cached_property
    def error(self) -> GradientError:
        """Errors on 256 rows against exact float64 values, measured at the first access."""
        call, head, ours = self._call, self._head, self._rows
        if call is None or head is None or ours is None:
            raise InputError("error is measured for one head with a target, not causal")
        sizes = tuple(x.double().square().sum(1) for x in (self.output, ours))
        sample = RowSample.draw(head, SAMPLED_ROWS, seed=0, measures=sizes)
        output, rows = row_gradients(call, head, sample.rows)

        def measured(given: Tensor, exact: Tensor) -> tuple[float, float]:
            error = (given[sample.rows].double() - exact).square().sum(1)
            return sample.frobenius_limit(error, exact.square().sum(1))

        count, limits = len(sample.rows), (*measured(self.output, output), *measured(ours, rows))
        return GradientError(*limits, count, 1.0 if count == head.n else CONFIDENCE)

    def __str__(self) -> str:
        loss = "from above" if self.loss is None else f"loss {float(self.loss):.6g}"
        lines = [f"AttentionLossGradient: {loss}", str(self.plan)]
        if self.low_rank is not None:
            lines.append(str(self.low_rank))
        if self.invalid_rows:
            fallback = f"{self.fallback_rows} of them computed exactly"
            lines.append(f"{self.invalid_rows} rows without a usable sum, {fallback}")
        return "\n".join(lines)

    __repr__ = __str__
