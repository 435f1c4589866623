"""The cost of a plan: multiply-adds for `Plan.cost`, predicted seconds for `Plan.speedup`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch

from ..components.streaming import CAUSAL_CHUNK
from ..lists.sorting import AXES, SORTED
from ..lists.tables import SCORED_MEMBERS, ListSettings
from ..polynomials.balancing import TRANSFORM_TOKENS
from ..polynomials.certified import true_rank
from ..polynomials.features import block_rows
from ..problem.problem import Head
from ..sketch import PolySketch
from .calibration import rates_of, threads

# ---- of any head
HEAD_SECONDS = 3e-4  # fixed time of a head on a CPU, where heads run one after the other
CALL_SECONDS = 4e-4  # fixed time of a call on a GPU, where they run together
EXACT_SECONDS = 2e-5  # the same of exact attention
BLOCK_SECONDS = 5e-6  # of one elementwise operation on a block of features
MOVE_SECONDS = 1e-10  # of moving an entry on a GPU, at most
MOVE_PAIRS = 1 / 32  # of moving an entry on a CPU, in exact pairs of one thread at 64 dims
MOVE_SERIAL = 0.5  # share of that which more threads do not make faster
CAUSAL_TOKENS = 3072  # of a causal head on a GPU from which on SDPA gains by the mask
# ---- of polynomials by GPU kernels
KERNEL_PRODUCT = 2.5  # of one multiply-add of a feature, in multiply-adds of exact attention
KERNEL_READS = 0.5  # of reading an entry, in reads of a reduction
# ---- of fitted polynomials on a CPU
FITTED_SECONDS = 2e-3  # fixed time of a head
FITTED_TOKEN, FITTED_FEATURE = 60, 3  # entries moved for each entry of a token, for each feature
# ---- of fitted polynomials on a GPU, whose features are float32 and go through memory
FEATURE_COST = 32  # multiply-adds of exact attention in the time of one multiply-add of a feature
MOVE_COST = 700  # the same in the time of one moved entry
FIT_ENTRY = 9.5  # entries moved for each entry of a token and its value
# ---- of lists on a CPU: entries moved for an entry of a token and its value, for a pair of a mean
# query and a key, of a row and a tilted key, for an entry of a key in a list, for an exact pair
LIST_TOKEN, LIST_TILT, LIST_COARSE, LIST_GATHERED, LIST_EXACT = 54.0, 20.0, 40.0, 14.0, 18.0
LIST_SECONDS = 2e-3  # fixed time of a head
# ---- of lists by GPU kernels, in exact pairs: a pair of a mean query and a key, a pair of a row
# that is scored and a tilted key in `select`, of a row and a tilted key in `attend`; and seconds to
# sort and gather an entry of a token
TILT_PAIR, SELECT_PAIR, LIST_PAIR, TOKEN_SECONDS = 3.1, 4.0, 1.7, 4e-12


def _has_kernels(head: Head) -> bool:
    """Whether GPU kernels take such tokens (see `engine.dispatch`)."""
    small = head.query.dtype != torch.float64 and max(head.dim, head.value_dim) <= 256
    return small and head.query.is_cuda and find_spec("triton") is not None


@dataclass(frozen=True)
class Work:
    """What one head takes."""

    multiply_adds: float = 0  # and what takes as long as so many of exact attention
    varying: float = 0.0  # predicted seconds, without the fixed time of any head

    def __add__(self, other: Work) -> Work:
        return Work(self.multiply_adds + other.multiply_adds, self.varying + other.varying)

    def cost(self, head: Head) -> float:
        """Multiply-adds relative to those of exact attention on the same head."""
        exact = head.pairs * (head.dim + head.value_dim)
        return self.multiply_adds / exact if exact else 1.0

    def seconds(self, head: Head) -> float:
        """Predicted time on this machine."""
        fixed = CALL_SECONDS / head.together if head.query.is_cuda else HEAD_SECONDS
        return fixed + self.varying

    def speedup(self, head: Head) -> float:
        """Predicted time of exact attention over predicted time of this work."""
        return exact_seconds(head) / self.seconds(head)

    def settings(self, head: Head) -> dict[str, Any]:
        """What every `HeadPlan` of this work has."""
        return {"n": head.n, "m": head.m, "cost": self.cost(head), "speedup": self.speedup(head)}


def work_of(
    head: Head,
    exact: int = 0,  # pairs summed exactly
    dense: int = 0,  # pairs at which p is evaluated densely (causal diagonal, powers)
    scanned: int = 0,  # entries read to split, to bound norms and to sample
    formed: int = 0,  # features of sketches, and of what is sketched
    products: int = 0,  # multiply-adds of sketches and of their features with the values
    moved: int = 0,  # entries gathered, sorted and copied: adds to time only
) -> Work:
    """So much of each kind of work, by PyTorch operations."""
    rates = rates_of(head)
    if head.query.device.type == "cpu":
        move = MOVE_PAIRS * rates.pairs[-1][1] * (MOVE_SERIAL * threads() + 1)
    else:
        move = min(rates.scan, MOVE_SECONDS)
    made = (exact + dense) * (head.dim + head.value_dim) + scanned + formed + products
    seconds = (1.3 * exact + 2.0 * dense) * rates.pair(head) + scanned * rates.scan
    return Work(made, seconds + formed * rates.feature + products * rates.product + moved * move)


def exact_seconds(head: Head) -> float:
    """Predicted time of SDPA on this head. On a CPU its causal kernel gives threads equal parts of
    the rows, and the last part has the most pairs; on a GPU it takes half of the time where heads
    are long."""
    pair, causal = rates_of(head).pair(head), 1.0
    if head.is_causal and head.query.device.type == "cpu":
        causal = 2 - 1 / threads()
    elif head.is_causal:
        causal = min(2.0, 1 + CAUSAL_TOKENS / max(1, head.n))
    together = head.together if head.query.is_cuda else 1
    return EXACT_SECONDS / together + head.pairs * pair * causal


def pair_work(head: Head, pairs: int) -> Work:
    """So many pairs exactly."""
    return work_of(head, _visited(head, pairs))


def _visited(head: Head, pairs: int) -> int:
    """Of so many pairs those that count: about half in a causal head."""
    return int(pairs * (head.pairs / max(1, head.n * head.m)))


def _diagonal(head: Head, rows: int) -> int:
    """Pairs of a causal head that are computed densely, whatever sums the others."""
    return rows * CAUSAL_CHUNK // 2 if head.is_causal else 0


def polynomial_work(head: Head, rows: int, keys: int, degree: int) -> Work:
    """Features of ``rows`` rows and ``keys`` keys: by GPU kernels, or in blocks by PyTorch
    operations; and the causal diagonal."""
    tokens, dense = rows + keys, _diagonal(head, rows)
    rates, rank, width = rates_of(head), true_rank(head.dim, degree), head.dim + head.value_dim
    products = tokens * rank * (head.value_dim + 2)
    if _has_kernels(head) and 1 <= degree <= 2:
        seconds = products * KERNEL_PRODUCT * rates.pair(head) / width
        seconds += KERNEL_READS * tokens * width * rates.scan
    else:
        steps = 10 + (head.dim * (degree - 1) if degree > 2 else 2)
        seconds = math.ceil(tokens / block_rows(rank, head.dtype)) * BLOCK_SECONDS * steps
        seconds += tokens * rank * (rates.feature + rates.product * head.value_dim)
    work = work_of(head, dense=dense, scanned=2 * (head.n + head.m) * head.dim)
    return work + Work(dense * degree + products, seconds)


def power_work(
    head: Head, rows: int, keys: int, power: int, size: int | None, degree: int = 1
) -> Work:
    """The power of a polynomial of ``degree``, of ``rows`` rows and ``keys`` keys: pair by pair,
    or by a sketch of ``size`` rows."""
    pairs, tokens = _visited(head, rows * keys), rows + keys
    if size is None:
        return work_of(head, dense=pairs)
    rank, packed = true_rank(head.dim, degree), true_rank(size, 2)
    sketch = PolySketch(power, size).cost(rank).multiply_adds
    return work_of(
        head,
        dense=min(pairs, _diagonal(head, rows)),
        formed=tokens * (rank + packed),
        products=tokens * (sketch + packed * (head.value_dim + 1)),
    )


def fitted_work(head: Head, count: int, far_rows: int, far_keys: int) -> Work:
    """A fitted polynomial: transform, ``count`` features and far tokens. On a GPU, features and
    moved entries count as the multiply-adds of exact attention in the same time."""
    tokens, moved, more = head.n + head.m, 0, Work()
    far = far_rows * head.m + (head.n - far_rows) * far_keys
    products = tokens * count * (head.value_dim + 1)
    if _has_kernels(head):
        moved = int(FIT_ENTRY * tokens * (head.dim + head.value_dim))
        more = Work((FEATURE_COST - 1) * products + MOVE_COST * moved)
    elif head.query.device.type == "cpu":
        moved = tokens * (FITTED_TOKEN * head.dim + FITTED_FEATURE * count)
        more = Work(varying=FITTED_SECONDS)
    sampled = min(head.n, TRANSFORM_TOKENS) + min(head.m, TRANSFORM_TOKENS)  # for covariances
    products += (tokens + sampled) * head.dim**2
    dense, formed = _diagonal(head, head.n), tokens * count
    more += work_of(head, dense=dense, formed=formed, products=products, moved=moved)
    return more + pair_work(head, far)


def list_work(head: Head, settings: ListSettings, opened: float) -> Work:
    """Sorting, tilts, selection and attention by lists, with ``opened`` open leaves a row."""
    dim, width, leaf = head.dim, head.value_dim, settings.leaf
    keys = min(head.n, head.m) if settings.window else head.m
    leaves = float(math.ceil(keys / leaf))
    if settings.window:  # a row attends to the leaves of earlier windows, on average half of them
        windows = math.ceil(head.n / settings.window)
        leaves = min(leaves, settings.window // leaf * (windows - 1) / 2)
    cells, scored = head.n / settings.block, min(1.0, SCORED_MEMBERS / settings.block)
    tilted = cells * leaves * leaf  # pairs of mean queries and keys
    coarse = head.n * leaves  # pairs of rows and tilted keys
    exact = head.n * (opened * leaf + settings.window / 2)  # half of its own window
    splits = 2 * math.log2(max(2.0, min(keys, SORTED) / leaf))
    sorting = (head.n + keys) * (dim * (dim + 2 * AXES) + splits * AXES * (AXES + 2))
    selected = scored * coarse  # pairs of rows and tilted keys that `select` scores
    by_kernels = _has_kernels(head)
    made = sorting + tilted * (2 * dim + width) + coarse * (dim + width)
    if settings.strict or by_kernels:  # scored for selection, and again for attention
        made += selected * dim
    if by_kernels:
        pairs = TILT_PAIR * tilted + SELECT_PAIR * selected + LIST_PAIR * (coarse + exact)
        seconds = pairs * rates_of(head).pair(head)
        seconds += TOKEN_SECONDS * (head.n + keys) * (dim + width)
        return Work(int(made + exact * (dim + width)), seconds)
    tokens = LIST_TOKEN * (head.n + keys) + LIST_GATHERED * cells * opened * leaf
    moved = tokens * (dim + width) + LIST_TILT * tilted + LIST_EXACT * exact
    moved += LIST_COARSE * coarse * (2 if settings.strict else 1)
    work = work_of(head, int(exact), products=int(made), moved=int(moved))
    return work + Work(varying=LIST_SECONDS)
