"""Lists of exact and tilted keys for blocks of similar queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InputError
from ..plans import HeadPlan, ListHead
from ..problem.checks import check_number, check_seed
from ..problem.problem import Head
from .base import Method, exact_plan
from .list_search import WIDE_BLOCK, ListSearch

LARGEST_BLOCK = 1024
BUDGET = 0.1  # where neither budget nor tolerance is given


@dataclass(frozen=True)
class BlockSupport(Method):
    """Every block of similar queries attends exactly to its important keys, to the rest in sum.

    Keys are sorted into leaves of similar keys, queries into blocks of ``block_size`` similar ones.
    For a block, the keys of a leaf act as one tilted key: their mean, weighted as the block's mean
    query weighs them. Leaves whose tilted key would err too much are attended to exactly.
    ``budget`` is the total cost relative to exact attention, 0.1 unless given; a measured error
    above 5 % is warned about. With a ``tolerance`` instead, the lists are the shortest whose
    measured error on sampled rows, at its upper limit (95 % confidence), is within it, and a head
    for which there are none is exact.

    In causal attention each query attends to its own window of positions exactly, to earlier
    windows through lists. Later keys and values are never used, but lists depend on later queries
    of the window unless ``strict``: then blocks come from the window before, and no output depends
    on a later token. None: strict exactly when gradients are recorded.
    """

    budget: float | None = None
    tolerance: float | None = None
    block_size: int | None = None  # a power of two; None: 32 to 512, by the length
    strict: bool | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.budget is not None and self.tolerance is not None:
            raise InputError("budget and tolerance are both given; expected one of them")
        if self.tolerance is None:
            self._set(budget=check_number("budget", BUDGET if self.budget is None else self.budget))
        else:
            self._set(tolerance=check_number("tolerance", self.tolerance))
        size = self.block_size
        whole = type(size) is int and 2 <= size <= LARGEST_BLOCK and size & (size - 1) == 0
        if size is not None and not whole:
            wanted = f"a power of two from 2 to {LARGEST_BLOCK}"
            raise InputError(f"block_size must be {wanted}, got {size!r}")
        if self.strict is not None and type(self.strict) is not bool:
            raise InputError(f"strict must be True, False or None, got {self.strict!r}")
        self._set(seed=check_seed(self.seed))

    def shared(self, heads: Sequence[Head], plans: Sequence[HeadPlan]) -> Sequence[HeadPlan]:
        """Plans by budget share the highest price of all batch elements: none costs more."""
        if self.budget is None:
            return plans
        lists = (plan.lists for plan in plans if isinstance(plan, ListHead))
        shared = max(lists, key=lambda settings: (settings.block, settings.price))
        searches = [self._search(head, shared.block) for head in heads]
        return [search.at(shared.price) for search in searches if isinstance(search, ListSearch)]

    def _search(self, head: Head, block: int | None) -> ListSearch | str:
        return ListSearch.of(head, block, self.strict, self.seed, self.tolerance or 1.0)

    def plan_head(self, head: Head) -> HeadPlan:
        budget = self.budget or BUDGET
        if budget >= 1:
            return exact_plan(head, f"a budget of {budget:g} covers all keys")
        search = self._search(head, self.block_size)
        if isinstance(search, str):
            return exact_plan(head, search)
        if self.tolerance is not None:
            reason = f"no lists within {self.tolerance:g} are cheaper than exact attention"
            return search.within(self.tolerance) or exact_plan(head, reason)
        plan = search.affordable(budget)
        while plan is None and self.block_size is None and 2 * search.settings.block <= WIDE_BLOCK:
            wider = self._search(head, 2 * search.settings.block)  # and cheaper
            if isinstance(wider, str):
                break
            search, plan = wider, wider.affordable(budget)
        return plan or exact_plan(head, f"no lists within a budget of {budget:g}")
