"""A plan's error on sampled query rows, without running it: weights of those rows, densely."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..engine.jensen import least_lse
from ..plans import FittedHead, PolynomialHead, ThresholdHead
from ..polynomials.balancing import transformed
from ..problem.problem import Head
from ..problem.result import FAILED_SHARE
from .sampling import RowSample

ROWS, FEWEST, SHARE = 256, 128, 64  # at most and at least; one of so many in between
ENTRIES = 2**24


class RowCheck:
    """Exact output of sampled rows, computed once, against which any plan can be compared."""

    def __init__(self, head: Head, tolerance: float, seed: int) -> None:
        self.head, self.tolerance = head, tolerance
        dtype = torch.float64 if tolerance < 1e-5 else head.dtype
        wanted = min(ROWS, max(FEWEST, head.n // SHARE))
        count = max(16, min(wanted, ENTRIES // max(1, head.m)))
        self.sample = RowSample.draw(head, count, seed)
        self.rows, self.value = self.sample.rows, head.value.to(dtype)
        self.scores = (head.query[self.rows].to(dtype) * head.scale) @ head.key.to(dtype).T
        self.log_weight = head.log_weights(dtype)  # [m]; of pairs [rows, m] in a causal head
        if head.is_causal:
            later = torch.arange(head.m, device=head.key.device) > self.rows.unsqueeze(1)
            self.log_weight = self.log_weight.masked_fill(later, -math.inf)
        total = self.scores + self.log_weight
        self.top = total.amax(1, keepdim=True)
        self.top.masked_fill_(self.top == -math.inf, 0.0)
        self.weight = (total - self.top).exp_()
        self.exact = self._output(self.weight)

    def _output(self, weight: Tensor) -> Tensor:
        output = weight @ self.value
        output = output / weight.sum(1, keepdim=True) if self.head.normalise else output
        return output.nan_to_num()

    def error(self, plan: PolynomialHead | FittedHead) -> tuple[float, float]:
        """Measured error of the plan on the sampled rows, and its upper limit."""
        weight = self._fitted(plan) if isinstance(plan, FittedHead) else self._polynomial(plan)
        rows, keys = plan.split(self.head)
        if keys.large is not None:
            weight[:, keys.large] = self.weight[:, keys.large]
        if rows.large is not None:
            large = torch.isin(self.rows, rows.large)
            weight[large] = self.weight[large]
        if isinstance(plan, FittedHead):
            log_sum = weight.sum(1).log().double() + self.top.squeeze(1)
            failed = ~(log_sum >= least_lse(plan, self.head, self.rows))
            if self.sample.total(failed.double()) > FAILED_SHARE * self.head.n:
                return math.inf, math.inf  # too many exact rows: the cost would be wrong
            weight[failed] = self.weight[failed]
        squared = (self._output(weight) - self.exact).double().square().sum(-1)
        size = self.exact.double().square().sum(-1)
        return self.sample.frobenius_limit(squared, size)

    def small_share(self, plan: ThresholdHead) -> float:
        """Root mean square, over sampled small rows, of the share of weight on small keys: of an
        error of the polynomial that much reaches the output."""
        rows, keys = plan.split(self.head)
        weight = self.weight
        if rows.large is not None:
            weight = weight[~torch.isin(self.rows, rows.large)]
        if keys.large is None or not len(weight):
            return 1.0
        total = weight.sum(1).double()
        large = weight[:, keys.large].sum(1).double() / total.where(total > 0, 1.0)
        return float((1 - large).clamp(min=0).square().mean().sqrt())

    def _polynomial(self, plan: PolynomialHead) -> Tensor:
        return plan.polynomial(self.scores).mul_((plan.bound - self.top + self.log_weight).exp_())

    def _fitted(self, plan: FittedHead) -> Tensor:
        balanced = transformed(self.head, plan.transform)
        query, key = balanced.query[self.rows].to(self.scores), balanced.key.to(self.scores)
        shift = plan.transform.row_shift(self.head, self.rows).unsqueeze(1) - self.top
        log_weight = balanced.log_weights(self.scores.dtype) + shift
        log_weight.masked_fill_(self.log_weight == -math.inf, -math.inf)
        return plan.fitted(query, key).mul_(log_weight.exp_())
