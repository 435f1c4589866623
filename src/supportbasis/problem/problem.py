"""`Problem`: a validated call; `Head`: the two-dimensional problem of one of its heads; `Outcome`:
what a plan makes of the call."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .rounding import compute_dtype, unit_roundoff

if TYPE_CHECKING:
    from ..plans.supports import RowGroup

FAILED_SHARE = 0.01  # of a head's rows: a plan on which more rows fail is reported


def in_rows(x: Tensor) -> Tensor:
    """The same tokens [..., tokens, dim], the entries of each next to each other in memory:
    kernels, PyTorch's own for CPUs among them, ignore the last stride."""
    separate = x.stride(-1) == 1 and (x.shape[-2] < 2 or x.stride(-2) >= x.shape[-1])
    return (x if separate else x.contiguous()).resolve_neg()


def largest_entries(x: Tensor) -> Tensor:
    """max_j |x_ij| of each row, `[..., n, d]` -> `[..., n]`, same dtype; |x| itself would fill as
    much fresh memory as x, which is slow."""
    if x.shape[-1] == 0:
        return x.new_zeros(x.shape[:-1])
    return torch.maximum(x.detach().amax(-1), x.detach().amin(-1).neg())


def _norms(x: Tensor, maxima: Tensor) -> Tensor:
    """Row norms, never below the true ones: in float32 where no square can overflow or vanish."""
    top = float(maxima.max()) if maxima.numel() else 1.0
    dtype = torch.float32 if 1e-12 < top < 1e12 and x.dtype != torch.float64 else torch.float64
    unit = top if top > 1e150 or 0 < top < 1e-150 else 1.0
    norms = torch.linalg.vector_norm(x / unit if unit != 1.0 else x, dim=-1, dtype=dtype).double()
    return norms * unit * (1 + (x.shape[-1] + 4) * unit_roundoff(dtype))


@dataclass(frozen=True, eq=False)
class Pairs:
    """Rows of ``query`` attend to rows of ``key``: of one head, or [batch, heads, ...] of a call.

    A pair (i, j) has weight ``exp(scale * <q_i, k_j> + key_log_weight_j)``, and zero when
    ``is_causal`` and ``j > i``. A padded key has log-weight ``-inf``."""

    query: Tensor  # [n, d]
    key: Tensor  # [m, d]
    value: Tensor  # [m, dv]
    key_log_weight: Tensor | None  # [m]
    query_log_weight: Tensor | None  # [n], known factor of each row of an unnormalised sum
    scale: float
    is_causal: bool
    normalise: bool  # attention divides by the row sum, a kernel sum does not
    mask: Tensor | None = None  # [n, m] bool or bias; only exact sums take it
    precision: torch.dtype | None = None  # of all sums; None: chosen from the input
    is_reused: bool = False  # whether the plan will serve many calls, and may take some time

    @property
    def dtype(self) -> torch.dtype:
        return self.precision or compute_dtype(self.query.dtype)

    @property
    def n(self) -> int:
        return self.query.shape[-2]

    @property
    def m(self) -> int:
        return self.key.shape[-2]

    @property
    def dim(self) -> int:
        return self.query.shape[-1]

    @property
    def value_dim(self) -> int:
        return self.value.shape[-1]


@dataclass(frozen=True, eq=False)
class Head(Pairs):
    """One (batch, head) pair."""

    together: int = 1  # heads of the call, which run at once on a GPU

    @property
    def pairs(self) -> int:
        """Number of pairs that exact attention would visit."""
        if not self.is_causal:
            return self.n * self.m
        square = min(self.n, self.m)
        return square * (square + 1) // 2 + max(0, self.n - self.m) * self.m

    @property
    def requires_grad(self) -> bool:
        return any(x.requires_grad for x in (self.query, self.key, self.value))

    @property
    def is_density(self) -> bool:
        """Whether this is a density: rows carry known factors, errors count over the largest sum,
        and the value is one column of ones, so that numerator and denominator are the same."""
        return self.query_log_weight is not None

    @cached_property
    def query_norms(self) -> Tensor:
        """Euclidean norm of each query in float64, rounded up."""
        return _norms(self.query.detach(), self.query_maxima)

    @cached_property
    def key_norms(self) -> Tensor:
        return _norms(self.key.detach(), self.key_maxima)

    @cached_property
    def query_maxima(self) -> Tensor:
        """Largest |entry| of each query row: what a threshold is compared with, in float64,
        since a comparison in half precision would round the threshold."""
        return largest_entries(self.query.detach()).double()

    @cached_property
    def key_maxima(self) -> Tensor:
        return largest_entries(self.key.detach()).double()

    def log_weights(self, dtype: torch.dtype) -> Tensor:
        """Log-weights of all keys [m], zeros where there are none."""
        if self.key_log_weight is None:
            return self.key.new_zeros(self.m, dtype=dtype)
        return self.key_log_weight.to(dtype)

    @cached_property
    def live_keys(self) -> Tensor | None:
        """Indices of the keys that are not padded; None when all of them are live."""
        if self.key_log_weight is None:
            return None
        live = self.key_log_weight > -math.inf
        return None if bool(live.all()) else live.nonzero().squeeze(1)


class Kept(dict[tuple[int, int], "tuple[Head, Sequence[RowGroup]]"]):
    """Components of each (batch, head) that ran, and what they save for the backward pass."""


@dataclass(frozen=True, eq=False)
class Problem(Pairs):
    """A validated call, with leading dims flattened to [batch, heads] and layout settled; keys and
    values are [batch, key heads, ...]."""

    leading: tuple[int, ...] = ()  # the caller's leading dims, heads included
    dropout_p: float = 0.0
    kept: Kept | None = None  # filled by a forward pass for the backward pass
    is_flipped: bool = False  # whether the caller's scale is negative

    def __post_init__(self) -> None:
        for name in ("query", "key", "value"):
            object.__setattr__(self, name, in_rows(getattr(self, name)))
        for name in ("key_log_weight", "query_log_weight"):
            weight = getattr(self, name)
            if weight is not None and weight.stride(-1) != 1:
                object.__setattr__(self, name, weight.contiguous())

    @property
    def batch(self) -> int:
        return self.query.shape[0]

    @property
    def heads(self) -> int:
        return self.query.shape[1]

    @property
    def group(self) -> int:
        """Query heads per key head."""
        return self.heads // max(1, self.key.shape[1])

    @property
    def requires_grad(self) -> bool:
        tensors = (self.query, self.key, self.value, self.key_log_weight)
        return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)

    @property
    def given_scale(self) -> float:
        """The caller's scale; if it was negative, the queries here have its sign."""
        return -self.scale if self.is_flipped else self.scale

    @property
    def needs_exact(self) -> str | None:
        """Why no approximation applies to this call, or None."""
        if self.dropout_p > 0:
            return "dropout draws weights pair by pair"
        if self.mask is not None:
            return "the mask is not a key mask: it depends on the query"
        return None

    @cached_property
    def _heads(self) -> dict[tuple[int, int], Head]:
        return {}

    def head(self, batch: int, head: int) -> Head:
        """One head; cached, so that norms found while planning serve the execution too."""
        at, key_at = (batch, head), (batch, head // self.group)
        if at not in self._heads:
            factors = (self.key_log_weight, self.query_log_weight, self.mask)
            weight, row_weight, mask = (None if x is None else x[at] for x in factors)
            self._heads[at] = Head(
                self.query[at], self.key[key_at], self.value[key_at], weight, row_weight,
                self.scale, self.is_causal, self.normalise, mask, is_reused=self.is_reused,
                together=self.batch * self.heads,
            )  # fmt: skip
        return self._heads[at]

    def each_head(self) -> Iterator[tuple[int, int, Head]]:
        for at in product(range(self.batch), range(self.heads)):
            yield *at, self.head(*at)

    def restore(self, tensor: Tensor) -> Tensor:
        """[batch, heads, ...] back to the caller's leading dims."""
        return tensor.reshape((*self.leading, *tensor.shape[2:]))


@dataclass
class Outcome:
    """Result of running a plan, [batch, heads, ...]."""

    output: Tensor  # [batch, heads, n, dv], input dtype
    lse: Tensor  # [batch, heads, n]
    log_scale: Tensor  # [batch, heads]: units of the output of a kernel sum, 0 for attention
    invalid_rows: Tensor  # [batch, heads]: rows without a usable denominator
    rounding: Tensor  # [batch, heads]: largest relative rounding error of a row's sums
    fallback: Tensor  # [batch, heads, n]: failed rows that were computed exactly

    @staticmethod
    def empty(problem: Problem) -> Outcome:
        """Memory for output and lse of all heads; the rest is zero."""
        query, rows = problem.query, (problem.batch, problem.heads, problem.n)
        output = query.new_empty(*rows, problem.value_dim)
        lse = query.new_empty(rows, dtype=problem.dtype)
        failed = query.new_zeros(rows, dtype=torch.bool)
        units, invalid, rounding = lse.new_zeros(3, *rows[:2]).unbind(0)
        return Outcome(output, lse, units, invalid, rounding, failed)

    @property
    def fallback_rows(self) -> Tensor:
        """How many failed rows were computed exactly, [batch, heads]."""
        return self.fallback.sum(-1)
