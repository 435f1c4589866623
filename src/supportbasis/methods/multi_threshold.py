"""The multi-threshold support basis (the paper's appendices F to I)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

from torch import Tensor

from ..basis import LARGEST_REACH, buckets_of, score_reach
from ..buckets import check_ratio, edges, smallest_maximum
from ..cost import Work, kernel_work, pair_work
from ..errors import InputError
from ..features import check_rank
from ..plans import BucketPair, HeadPlan
from ..powers import LARGEST_POWER, PowerKernel, normalising_constant, smallest_power
from ..problem import Head
from ..scores import ScoreSample, best_polynomial
from .base import Method, check_degree, check_seed, check_sketch_size, exact_plan

MOST_PAIRS = 4096
SMALL_SHARE = 1 / 16  # of all pairs: a bucket pair below is exact where that is cheaper
HIGH_POWER = 8  # sketches of higher powers say little: exact where that is affordable,
AFFORDABLE = 4.0  # that is, at no more than this many times the work of the sketch,
HIGHEST_POWER = 64  # and always beyond this power

Members = tuple[Tensor | None, Tensor | None]  # rows and keys of a pair; None: all


@dataclass(frozen=True)
class MultiThreshold(Method):
    """Rows and keys in buckets by their largest entry; each pair of buckets is a power.

    Thresholds grow by ``ratio``: bucket l holds the rows with b ratio^(l-1) <= max|x| < b ratio^l,
    b being the smallest non-zero row maximum. In a pair of buckets whose scores are within
    [-reach, reach], exp(z) = exp(z/p)^p with p the smallest even number that is at least the
    paper's constant |scale| d T_l T_l' / ln n and makes |z/p| <= 0.5; exp(z/p) is a certified
    polynomial of ``degree``, and the power is a `PolySketch` of ``sketch_size`` rows, one for each
    power. ``sketch_size=None`` computes the power itself, pair by pair: that is quadratic
    and shows what the sketch costs in accuracy. ``ratio=inf`` is one bucket, one power.

    With a sketch, a pair that holds at most 1/16 of all pairs is exact where that takes less work,
    one with p > 8 where it takes at most four times the work, and one with p > 64 always: the
    variance of a sketch grows with p. Rows whose sketched denominator is provably too small are
    computed exactly.
    """

    ratio: float = 2.0
    degree: int = 1
    sketch_size: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ratio", check_ratio(self.ratio))
        object.__setattr__(self, "degree", check_degree(self.degree))
        object.__setattr__(self, "sketch_size", check_sketch_size(self.sketch_size))
        object.__setattr__(self, "seed", check_seed(self.seed))

    def plan_head(self, head: Head) -> HeadPlan:
        if self.sketch_size is not None:
            check_rank(head.dim, self.degree)
        live = head.live_keys
        keys = head.key_maxima if live is None else head.key_maxima[live]
        if not head.pairs or not len(keys):
            return exact_plan(head, "there are no pairs")
        smallest = smallest_maximum(head.query_maxima, keys)
        largest = max(float(head.query_maxima.max()), float(keys.max()))
        plan = HeadPlan(
            "multi-threshold",
            "",
            head.n,
            head.m,
            cost=1.0,
            speedup=1.0,
            row_edges=edges(head.query_maxima, smallest, largest, self.ratio),
            key_edges=edges(keys, smallest, largest, self.ratio),
        )
        return self._with_pairs(plan, head)

    def _with_pairs(self, plan: HeadPlan, head: Head) -> HeadPlan:
        count = len(plan.row_edges) * len(plan.key_edges)
        if count > MOST_PAIRS:
            raise InputError(
                f"ratio={self.ratio:g} makes {len(plan.row_edges)} x {len(plan.key_edges)} bucket "
                f"pairs, more than {MOST_PAIRS}; use a larger ratio"
            )
        row_sets, key_sets = buckets_of(plan, head)
        work = Work(scanned=3 * (head.n + head.m) * head.dim)
        pairs = []
        for i, j in product(range(len(row_sets)), range(len(key_sets))):
            edge, members = (plan.row_edges[i], plan.key_edges[j]), (row_sets[i], key_sets[j])
            pair, its_work = self._pair(edge, (i, j), head, members)
            pairs.append(pair)
            work = work + its_work
        cost, speedup = work.cost(head), work.speedup(head)
        return replace(plan, cost=cost, speedup=speedup, pairs=tuple(pairs))

    def _pair(
        self, edge: tuple[float, float], at: tuple[int, int], head: Head, members: Members
    ) -> tuple[BucketPair, Work]:
        """One pair of buckets: its range, its power, and how it is summed."""
        rows, keys = members
        count = (head.n if rows is None else len(rows), head.m if keys is None else len(keys))
        by_entry = abs(head.scale) * head.dim * edge[0] * edge[1]
        reach = min(by_entry, score_reach(head, rows, keys), LARGEST_REACH)
        n = max(head.n, _live_count(head))
        constant = normalising_constant(*edge, head.scale, head.dim, n)
        power = smallest_power(reach, constant)
        sample = ScoreSample.draw(head, rows, keys)
        poly = best_polynomial(sample, self.degree, reach / power, power=power)
        # pairs of equal power share a sketch: its common factor then cancels in the division
        kernel, work = _chosen(head, count, PowerKernel(power, poly, self.sketch_size, self.seed))
        work = work + Work(scanned=ScoreSample.MULTIPLY_ADDS * head.dim)
        return BucketPair(*at, *count, reach, kernel), work


def _live_count(head: Head) -> int:
    """Padded keys count for nothing: a padded call plans as if they were absent."""
    return head.m if head.live_keys is None else len(head.live_keys)


def _chosen(
    head: Head, count: tuple[int, int], kernel: PowerKernel
) -> tuple[PowerKernel | None, Work]:
    """The kernel and its work, or None and exact work where that is the better way."""
    rows, keys = count
    work, exact = kernel_work(head, rows, keys, kernel), pair_work(head, rows, keys)
    if kernel.power >= LARGEST_POWER:
        return None, exact
    if kernel.sketch_size is None:
        return kernel, work
    ratio = exact.multiply_adds(head) / work.multiply_adds(head)
    small = rows * keys <= SMALL_SHARE * head.n * _live_count(head)
    cheaper = small and ratio <= 1
    high = kernel.power > HIGH_POWER and ratio <= AFFORDABLE
    if cheaper or high or kernel.power > HIGHEST_POWER:
        return None, exact
    return kernel, work
