"""The multi-threshold support basis (the paper's appendices F to I)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from torch import Tensor

from ..accuracy.estimates import SAMPLED_SCORES, best_polynomial
from ..errors import InputError
from ..paper.buckets import check_ratio, edges, smallest_maximum
from ..plans import BucketHead, BucketPair, HeadPlan
from ..plans.cost import pair_work, power_work, work_of
from ..plans.supports import score_reach, take
from ..polynomials.features import check_rank
from ..polynomials.powers import LARGEST_POWER, PowerKernel, normalising_constant, smallest_power
from ..problem.checks import check_integer, check_seed
from ..problem.problem import Head
from .base import Method, check_polynomial, check_sketch_size, exact_plan, live_count

MOST_PAIRS = 4096
MOST_POLYNOMIALS = 64  # largest bucket pairs, which always get a polynomial
POLYNOMIAL_WORK = 2**26  # multiply-adds in the 3 ms that it takes to find a polynomial
SMALL_SHARE = 1 / 16  # of all pairs: a smaller bucket pair is exact where that costs less
HIGH_POWER = 8  # sketches of higher powers are inaccurate: exact up to
EXACT_OVER_SKETCH = 4.0  # times the work of the sketch
HIGHEST_POWER = 64  # that is sketched


@dataclass(frozen=True, repr=False)
class MultiThreshold(Method):
    """Rows and keys in buckets by their largest entry; each pair of buckets is a power.

    Bucket l holds the rows with b ratio^(l-1) <= max|x| < b ratio^l, b being the smallest non-zero
    row maximum. In a pair of buckets, exp(z) = exp(z/p)^p with p the smallest even number that is
    at least the paper's constant |scale| d T_l T_l' / ln n and makes |z/p| <= 0.5; exp(z/p) is a
    certified polynomial of ``degree``, and the power is a `PolySketch` of ``sketch_size`` rows.
    ``sketch_size=None`` computes the power itself, pair by pair: that is quadratic and shows what
    the sketch costs in accuracy. ``ratio=inf`` is one bucket, one power.

    The variance of a sketch grows with p. So a pair with p > 8 is exact where that takes at most
    four times the work, one with p > 64 always, and one of at most 1/16 of all pairs where that
    takes less. Rows whose sketched denominator is provably too small are computed exactly. Beyond
    the 64 largest pairs, one is exact where finding a polynomial would take longer than its sums.

    ``polynomial`` is the kind of the polynomials, as in `SingleThreshold`.
    """

    ratio: float = 2.0
    degree: int = 1
    sketch_size: int | None = None
    seed: int = 0
    polynomial: str = "auto"

    def __post_init__(self) -> None:
        check_polynomial(self.polynomial)
        self._set(ratio=check_ratio(self.ratio), degree=check_integer("degree", self.degree, 0))
        self._set(sketch_size=check_sketch_size(self.sketch_size), seed=check_seed(self.seed))

    def plan_head(self, head: Head) -> HeadPlan:
        if self.sketch_size is not None:
            check_rank(head.dim, self.degree)
        maxima = take(head.key_maxima, head.live_keys)
        if not head.pairs or not len(maxima):
            return exact_plan(head, "there are no pairs")
        smallest = smallest_maximum(head.query_maxima, maxima)
        largest = max(float(head.query_maxima.max()), float(maxima.max()))
        row_edges = edges(head.query_maxima, smallest, largest, self.ratio)
        key_edges = edges(maxima, smallest, largest, self.ratio)
        if len(row_edges) * len(key_edges) > MOST_PAIRS:
            raise InputError(
                f"ratio={self.ratio:g} makes {len(row_edges)} x {len(key_edges)} bucket pairs, "
                f"more than {MOST_PAIRS}; use a larger ratio"
            )
        plan = BucketHead(n=head.n, m=head.m, row_edges=row_edges, key_edges=key_edges)
        rows, keys = plan.buckets(head)
        powers = _powers(head, plan, rows, keys)
        possible = [pair for pair, power in powers.items() if self._is_power(head, pair, power)]
        chosen = _worth_a_polynomial(head, possible)
        scanned = 3 * (head.n + head.m) + SAMPLED_SCORES * len(chosen)
        work, pairs = work_of(head, scanned=scanned * head.dim), []
        for pair, power in powers.items():
            if pair in chosen:
                kernel = self._kernel(head, rows[pair.row], keys[pair.key], pair.reach, power)
                pair = replace(pair, kernel=kernel)
                work += power_work(head, pair.rows, pair.keys, power, self.sketch_size, self.degree)
            else:
                work += pair_work(head, pair.rows * pair.keys)
            pairs.append(pair)
        reasons, left_out = [], len(possible) - len(chosen)
        if left_out:
            reasons.append(
                f"{left_out} of {len(pairs)} bucket pairs, the smallest, are exact: finding their "
                "polynomials would take longer than their sums"
            )
        if work.cost(head) > 1:
            reasons.append(f"costs {work.cost(head):.3g} times exact attention")
        reason = "; ".join(reasons)
        return replace(plan, reason=reason, pairs=tuple(pairs), **work.settings(head))

    def _is_power(self, head: Head, pair: BucketPair, power: int) -> bool:
        """Whether a power sums a pair at lower cost than exact sums."""
        if self.sketch_size is None:
            return power < LARGEST_POWER
        if power > HIGHEST_POWER:
            return False
        work = power_work(head, pair.rows, pair.keys, power, self.sketch_size, self.degree)
        ratio = pair_work(head, pair.rows * pair.keys).multiply_adds / work.multiply_adds
        is_small = pair.rows * pair.keys <= SMALL_SHARE * head.n * live_count(head)
        least = EXACT_OVER_SKETCH if power > HIGH_POWER else 1.0 if is_small else 0.0
        return ratio > least

    def _kernel(
        self, head: Head, rows: Tensor | None, keys: Tensor | None, reach: float, power: int
    ) -> PowerKernel:
        kind, inner = self.polynomial, reach / power
        poly = best_polynomial(head, rows, keys, self.degree, inner, power=power, kind=kind)
        sides = take(head.query_norms, rows), take(head.key_norms, keys)
        query, key = (float(norms.max()) for norms in sides)
        ratio = query / key if query > 0 and key > 0 else 1.0
        balance = min(max(ratio, 1e-300), 1e300)
        # pairs of equal power share a sketch: its common factor then cancels in the division
        return PowerKernel(power, poly, self.sketch_size, self.seed, balance)


def _powers(head: Head, plan: BucketHead, *sets: Sequence[Tensor | None]) -> dict[BucketPair, int]:
    """Every pair of buckets, with the certified range of its scores, and its power."""
    powers, n = {}, max(head.n, live_count(head))
    for (i, rows), (j, keys) in product(*map(enumerate, sets)):
        upper = plan.row_edges[i], plan.key_edges[j]
        by_entry = abs(head.scale) * head.dim * upper[0] * upper[1]
        reach = min(by_entry, score_reach(head, rows, keys))
        sizes = head.n if rows is None else len(rows), head.m if keys is None else len(keys)
        constant = normalising_constant(*upper, head.scale, head.dim, n)
        powers[BucketPair(i, j, *sizes, reach, None)] = smallest_power(reach, constant)
    return powers


def _worth_a_polynomial(head: Head, pairs: Sequence[BucketPair]) -> set[BucketPair]:
    """The largest pairs, and of the others those whose sums take longer than a polynomial does:
    heavy tails make thousands of pairs with a few tokens each."""
    largest = sorted(pairs, key=lambda pair: -pair.rows * pair.keys)[:MOST_POLYNOMIALS]
    work = {pair: pair_work(head, pair.rows * pair.keys).multiply_adds for pair in pairs}
    return {*largest, *(pair for pair in pairs if work[pair] > POLYNOMIAL_WORK)}
