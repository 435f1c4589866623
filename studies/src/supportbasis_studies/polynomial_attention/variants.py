"""What is compared with softmax: methods of the library, and plans changed on purpose."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from supportbasis.accuracy.estimates import best_polynomial
from supportbasis.methods import Method, MultiThreshold, Polynomial, PowerAttention
from supportbasis.methods.multi_threshold import MOST_PAIRS
from supportbasis.plans import BucketHead, BucketPair, HeadPlan, PowerHead
from supportbasis.polynomials.powers import PowerKernel
from supportbasis.problem.problem import Head

CHEBYSHEV = ", Chebyshev"
AS_RUN = "as the library runs it"
ALL_SKETCHED = "nothing exact"  # every bucket pair has a sketch of its own
SHARED = "nothing exact, shared sketches"  # bucket pairs of equal power share one


@dataclass(frozen=True)
class Variant:
    """A line of the tables: how the weights come about, and how the line is called."""

    label: str
    method: Method
    sketch_size: int | None = None  # replaces every bucket pair by a sketch, exact ones included
    share: bool = False

    @property
    def way(self) -> str:
        """How sketches are used; empty where there are none."""
        if self.sketch_size is not None:
            return SHARED if self.share else ALL_SKETCHED
        return AS_RUN if getattr(self.method, "sketch_size", None) is not None else ""

    def plan(self, head: Head, seed: int) -> HeadPlan:
        method = self.method
        if isinstance(method, MultiThreshold):
            method = replace(method, seed=seed)
        plan = method.plan_head(head)
        if self.sketch_size is None:
            return plan
        return all_sketched(plan, self.sketch_size, seed, share=self.share)


def all_sketched(plan: HeadPlan, size: int, seed: int, *, share: bool = False) -> HeadPlan:
    """Every bucket pair of an unsketched plan as a sketch, whatever its power and its size.

    Pairs have independent sketches, or with ``share`` the same one where their powers agree.
    """
    pairs = []
    assert isinstance(plan, BucketHead)
    for index, pair in enumerate(plan.pairs):
        if pair.kernel is None:  # exact, since no polynomial holds on its range
            pairs.append(pair)
            continue
        own = seed * MOST_PAIRS + (0 if share else index)
        pairs.append(replace(pair, kernel=replace(pair.kernel, sketch_size=size, seed=own)))
    return replace(plan, pairs=tuple(pairs))


def one_power(head: Head, degree: int, power: int) -> HeadPlan:
    """The plan of one bucket with another power than the method would choose."""
    plan = MultiThreshold(math.inf, degree).plan_head(head)
    assert isinstance(plan, BucketHead)
    (pair,) = plan.pairs
    reach = pair.reach / power
    polynomial = best_polynomial(head, None, head.live_keys, degree, reach, power=power)
    return replace(plan, pairs=(replace(pair, kernel=PowerKernel(power, polynomial)),))


def compared(degrees: tuple[int, ...], size: int) -> list[Variant]:
    """The lines of the first part: one polynomial, one power, several, powers alone, mean(V)."""
    lines = [Variant("mean(V)", Polynomial(0))]
    for degree in degrees:
        lines += [
            Variant(f"one polynomial, degree {degree}", Polynomial(degree)),
            Variant(f"one power, degree {degree}", MultiThreshold(math.inf, degree)),
            Variant(f"buckets 2, degree {degree}", MultiThreshold(2.0, degree)),
            Variant(f"buckets 1.5, degree {degree}", MultiThreshold(1.5, degree)),
            Variant(f"one power, degree {degree}{CHEBYSHEV}", _chebyshev(math.inf, degree)),
            Variant(f"buckets 2, degree {degree}{CHEBYSHEV}", _chebyshev(2.0, degree)),
        ]
        one, buckets = f"one power, degree {degree}", f"buckets 2, degree {degree}"
        lines += [
            Variant(_sketched(one, size), MultiThreshold(math.inf, degree), size),
            Variant(_sketched(buckets, size), MultiThreshold(2.0, degree), size),
            Variant(_sketched(buckets, size, SHARED), MultiThreshold(2.0, degree), size, True),
            Variant(_sketched(one, size, AS_RUN), MultiThreshold(math.inf, degree, size)),
            Variant(_sketched(buckets, size, AS_RUN), MultiThreshold(2.0, degree, size)),
        ]
    lines += [Variant(f"PowerAttention({power})", PowerAttention(power)) for power in (2, 4)]
    return lines


def _chebyshev(ratio: float, degree: int) -> MultiThreshold:
    """With the paper's polynomials, not the best ones."""
    return MultiThreshold(ratio, degree, polynomial="chebyshev")


def _sketched(label: str, size: int, way: str = ALL_SKETCHED) -> str:
    return f"{label}, sketch {size}, {way}"


def pairs_of(plan: HeadPlan) -> tuple[BucketPair, ...]:
    """The bucket pairs of a plan; of other plans, none."""
    return plan.pairs if isinstance(plan, BucketHead) else ()


@dataclass(frozen=True)
class Powers:
    """What a multi-threshold plan does with its pairs; of other plans, nothing."""

    row_buckets: int
    key_buckets: int
    largest_power: int
    mean_power: float  # weighted by the number of pairs, exact ones left out
    exact_share: float  # of all pairs

    @staticmethod
    def of(plan: HeadPlan) -> Powers:
        shares = [(pair.kernel, pair.rows * pair.keys) for pair in pairs_of(plan)]
        if isinstance(plan, PowerHead):
            shares = [(plan.kernel, plan.n * plan.m)]
        edges = (plan.row_edges, plan.key_edges) if isinstance(plan, BucketHead) else ((), ())
        total = sum(count for _, count in shares)
        powers = [(kernel.power, count) for kernel, count in shares if kernel is not None]
        covered = sum(count for _, count in powers)
        mean = sum(power * count for power, count in powers) / covered if covered else 0.0
        return Powers(
            len(edges[0]),
            len(edges[1]),
            max((power for power, _ in powers), default=0),
            mean,
            1 - covered / total if total else 0.0,
        )
