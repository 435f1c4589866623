"""One row for each measurement, and its errors against float64 on sampled rows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from supportbasis.plans import BucketHead, ExactHead, HeadPlan, ListHead, ThresholdHead
from supportbasis.problem.problem import Head
from supportbasis.problem.validation import attention_problem

from .. import reference
from ..comparison.measure import ROW_CHUNK, ExactRows
from ..comparison.settings import Setting
from ..polynomial_attention.variants import Powers
from ..study import Row

MATRIX_ROWS = 128  # of the attention matrix that are written down in float64


@dataclass(frozen=True, kw_only=True)
class EfficiencyRow(Row):
    """One method on one input. A number that does not exist is None."""

    part: str  # "thresholds": the paper's setting; "map": the harder ones
    seed: int
    n: int
    d: int
    scale: str
    sigma: float  # standard deviation of the scores, outliers aside
    outliers: bool
    method: str
    threshold: float | None = None
    seconds: float | None = None
    sdpa_seconds: float
    ratio: float | None = None  # SDPA's time over this one: above 1 is faster
    output_error: float | None = None  # relative Frobenius error
    matrix_error: float | None = None  # of D⁻¹A
    max_error: float | None = None  # largest error of the output over max|V|
    bound: float | None = None  # certified, on max_error
    exact_share: float | None = None  # of all pairs
    cost: float | None = None  # multiply-adds relative to exact attention
    ran: str
    note: str


@dataclass(frozen=True, eq=False)
class Truth:
    """Sampled rows of a setting with one head: exact output, and exact rows of D⁻¹A."""

    setting: Setting
    output: ExactRows
    rows: Tensor  # whose weights are known
    weights: Tensor  # [rows, m], float64

    @staticmethod
    def of(setting: Setting, seed: int) -> Truth:
        output = ExactRows.of(setting, seed)
        rows = output.rows[:: max(1, len(output.rows) // MATRIX_ROWS)][:MATRIX_ROWS]
        key = setting.key[0, 0].double() * setting.factor
        weights = torch.cat([(setting.query[0, 0, part].double() @ key.T).softmax(1)
                             for part in rows.split(ROW_CHUNK)])  # fmt: skip
        return Truth(setting, output, rows, weights)

    def mean_error(self) -> float:
        """Of the matrix whose entries are all 1/m."""
        return float((self.weights - 1 / self.weights.shape[1]).norm() / self.weights.norm())

    def matrix_error(self, plan: HeadPlan) -> float | None:
        """Of a plan's attention matrix, in float64; None where a plan has none to write down."""
        if plan.kind == "lists":
            return None
        square = 0.0
        for rows, exact in zip(
            self.rows.split(ROW_CHUNK), self.weights.split(ROW_CHUNK), strict=True
        ):
            weight, _ = reference.weights(self._head(rows), plan)
            total = weight.sum(1, keepdim=True)
            weight = weight * torch.where(total > 0, 1 / total, 0.0)
            square += float((weight - exact).square().sum())
        return square**0.5 / float(self.weights.norm())

    def _head(self, rows: Tensor) -> Head:
        """The head with these query rows alone."""
        setting = self.setting
        tensors = (setting.query[..., rows, :], setting.key, setting.value)
        return attention_problem(*tensors, None, 0.0, False, setting.factor, False).head(0, 0)


def exact_share(plan: HeadPlan) -> float | None:
    """Share of all pairs that are computed exactly; of lists of keys it is not known."""
    if isinstance(plan, ExactHead):
        return 1.0
    if isinstance(plan, ListHead):
        return None
    if isinstance(plan, ThresholdHead):
        return 1 - (1 - plan.large[0] / plan.n) * (1 - plan.large[1] / plan.m)
    return Powers.of(plan).exact_share if isinstance(plan, BucketHead) else 0.0
