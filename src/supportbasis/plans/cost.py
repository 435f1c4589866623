"""The cost of a plan: multiply-adds for `Plan.cost`, predicted seconds for `Plan.speedup`."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from ..components.streaming import CAUSAL_CHUNK
from ..lists.sorting import AXES, SORTED
from ..lists.tables import SCORED_MEMBERS, ListSettings
from ..polynomials.balancing import TRANSFORM_TOKENS
from ..polynomials.certified import true_rank
from ..polynomials.features import block_rows
from ..polynomials.powers import PowerKernel
from ..problem.problem import Head
from ..sketch import PolySketch
from .calibration import Rates, rates_of, threads

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
    """Amounts of each kind of work that one head takes."""

    exact_pairs: int = 0  # pairs summed exactly
    feature_rows: int = 0  # tokens (rows and keys) turned into features
    degree: int = 0
    dense_pairs: int = 0  # pairs at which p is evaluated densely (causal diagonal, powers)
    scanned: int = 0  # entries read to split, to bound norms and to sample
    formed: int = 0  # features of sketches, and of what is sketched
    products: int = 0  # multiply-adds of sketches and of their features with the values
    moved: int = 0  # entries gathered, sorted and copied: adds to time only
    equivalent: int = 0  # multiply-adds of exact attention in the same time: adds to cost only
    direct: float = 0.0  # seconds that are known as such: of lists by kernels, of fixed parts

    def __add__(self, other: Work) -> Work:
        """The sum of two amounts, of which at most one has features."""
        return Work(*(x + y for x, y in zip(astuple(self), astuple(other), strict=True)))

    def features(self, head: Head) -> int:
        return self.feature_rows * true_rank(head.dim, self.degree)

    def multiply_adds(self, head: Head) -> float:
        pair = head.dim + head.value_dim
        made = self.exact_pairs * pair + self.dense_pairs * (pair + self.degree)
        made += self.features(head) * (head.value_dim + 2)
        return made + self.scanned + self.formed + self.products + self.equivalent

    def cost(self, head: Head) -> float:
        """Multiply-adds relative to those of exact attention on the same head."""
        exact = head.pairs * (head.dim + head.value_dim)
        return self.multiply_adds(head) / exact if exact else 1.0

    def seconds(self, head: Head) -> float:
        """Predicted time on this machine."""
        rates, on_cpu = rates_of(head), head.query.device.type == "cpu"
        by_kernels = _has_kernels(head) and 1 <= self.degree <= 2
        features = (self._kernel_seconds if by_kernels else self._feature_seconds)(head, rates)
        pairs = (1.3 * self.exact_pairs + 2.0 * self.dense_pairs) * rates.pair(head)
        sketches = self.formed * rates.feature + self.products * rates.product
        cpu_move = MOVE_PAIRS * rates.pairs[-1][1] * (MOVE_SERIAL * threads() + 1)
        move = cpu_move if on_cpu else min(rates.scan, MOVE_SECONDS)
        reading = self.scanned * rates.scan + self.moved * move
        fixed = CALL_SECONDS / head.together if head.query.is_cuda else HEAD_SECONDS
        return fixed + self.direct + pairs + features + sketches + reading

    def _feature_seconds(self, head: Head, rates: Rates) -> float:
        """Features in blocks, by PyTorch operations."""
        rows = block_rows(true_rank(head.dim, self.degree), head.dtype)
        steps = 10 + (head.dim * (self.degree - 1) if self.degree > 2 else 2)
        formed = self.features(head) * (rates.feature + rates.product * head.value_dim)
        return formed + math.ceil(self.feature_rows / rows) * BLOCK_SECONDS * steps

    def _kernel_seconds(self, head: Head, rates: Rates) -> float:
        width = head.dim + head.value_dim
        products = self.features(head) * (head.value_dim + 2)
        read = KERNEL_READS * self.feature_rows * width * rates.scan
        return products * KERNEL_PRODUCT * rates.pair(head) / width + read

    def speedup(self, head: Head) -> float:
        """Predicted time of exact attention over predicted time of this work."""
        return exact_seconds(head) / self.seconds(head)

    def settings(self, head: Head) -> dict[str, Any]:
        """What every `HeadPlan` of this work has."""
        return {"n": head.n, "m": head.m, "cost": self.cost(head), "speedup": self.speedup(head)}


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


def polynomial_work(head: Head, rows: int, keys: int, degree: int) -> Work:
    """Features of ``rows`` rows and ``keys`` keys, and the causal diagonal."""
    dense = rows * CAUSAL_CHUNK // 2 if head.is_causal else 0
    scanned = 2 * (head.n + head.m) * head.dim
    return Work(feature_rows=rows + keys, degree=degree, dense_pairs=dense, scanned=scanned)


def pair_work(head: Head, pairs: int) -> Work:
    """So many pairs exactly; of those of a causal head about half count."""
    return Work(exact_pairs=int(pairs * (head.pairs / max(1, head.n * head.m))))


def kernel_work(head: Head, rows: int, keys: int, kernel: PowerKernel) -> Work:
    """A power of ``rows`` rows and ``keys`` keys: pair by pair, or sketched."""
    if kernel.sketch_size is None:
        return Work(dense_pairs=pair_work(head, rows * keys).exact_pairs)
    degree = 1 if kernel.polynomial is None else kernel.polynomial.degree
    return sketch_work(head, rows, keys, kernel.power, kernel.sketch_size, degree)


def sketch_work(head: Head, rows: int, keys: int, power: int, size: int, degree: int) -> Work:
    """A sketch of ``size`` rows of the power of a polynomial of ``degree``."""
    pairs, tokens = pair_work(head, rows * keys).exact_pairs, rows + keys
    rank, packed = true_rank(head.dim, degree), true_rank(size, 2)
    sketch = PolySketch(power, size).cost(rank).multiply_adds
    return Work(
        dense_pairs=min(pairs, rows * CAUSAL_CHUNK // 2) if head.is_causal else 0,
        formed=tokens * (rank + packed),
        products=tokens * (sketch + packed * (head.value_dim + 1)),
    )


def fitted_work(head: Head, count: int, far_rows: int, far_keys: int) -> Work:
    """A fitted polynomial: transform, ``count`` features and far tokens. On a GPU, features and
    moved entries count as the multiply-adds of exact attention in the same time."""
    tokens = head.n + head.m
    far = far_rows * head.m + (head.n - far_rows) * far_keys
    products = tokens * count * (head.value_dim + 1)
    sampled = min(head.n, TRANSFORM_TOKENS) + min(head.m, TRANSFORM_TOKENS)  # for covariances
    work = Work(
        exact_pairs=pair_work(head, far).exact_pairs,
        dense_pairs=head.n * CAUSAL_CHUNK // 2 if head.is_causal else 0,
        formed=tokens * count,
        products=products + (tokens + sampled) * head.dim**2,
    )
    if _has_kernels(head):
        moved = int(FIT_ENTRY * tokens * (head.dim + head.value_dim))
        equivalent = (FEATURE_COST - 1) * products + MOVE_COST * moved
        return replace(work, moved=moved, equivalent=equivalent)
    if head.query.device.type == "cpu":
        moved = tokens * (FITTED_TOKEN * head.dim + FITTED_FEATURE * count)
        return replace(work, moved=moved, direct=FITTED_SECONDS)
    return work


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
        return Work(equivalent=int(made + exact * (dim + width)), direct=seconds)
    tokens = LIST_TOKEN * (head.n + keys) + LIST_GATHERED * cells * opened * leaf
    moved = tokens * (dim + width) + LIST_TILT * tilted + LIST_EXACT * exact
    moved += LIST_COARSE * coarse * (2 if settings.strict else 1)
    return Work(int(exact), products=int(made), moved=int(moved), direct=LIST_SECONDS)
