"""Lists of exact and coarse keys for blocks of queries: for heads as trained models have them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

from ..arrangement import ORDERS
from ..blocks import PARTS, PLACES, START_NODES, BlockSettings, Structure, remembered
from ..checks import check_seed
from ..cost import ENGINE, ListSizes, block_work, handling
from ..errors import InputError
from ..frame import own_frame, plain_frame, prefix_of
from ..places import Profile
from ..plans import HeadPlan
from ..problem import Head
from ..rows import RowCheck
from ..sampling import RowSample
from ..tree import leaf_layout
from .base import Method, SearchTime, exact_plan, is_positive
from .block_check import BlockCheck
from .fitted import FittedSearch

TAILS = ("auto", "coarse", "polynomial")
LEAF = 16
BLOCK, DEVICE_BLOCK, LARGEST_BLOCK = 64, 128, 4096
SAMPLED_BLOCKS = 48
LEAST, MOST = -36.0, 0.0  # logarithms of the prices that are tried
STEPS = 14
LARGEST_SCORES = 100.0  # standard deviation: beyond, one key takes it all and no mean key helps
FIRST_GUESS = 10.0  # tolerance over the root of the first price that is tried
USELESS = 0.9  # measured error from which a plan is no answer, however cheap
SEQUENCE = "sequence"
STEEPEST = 1.0  # logarithm of the error over that of the price: it hardly ever falls faster
CHECKED_ROWS, TRIES = 512, 4  # that a plan is verified on, and prices that may fail there
STRIDE, HALVES = 4.0, 3  # steps of the logarithm of the price, and how often the last is halved


@dataclass(frozen=True)
class BlockSupport(Method):
    """Every block of queries attends exactly to the keys that matter and coarsely to the rest.

    Keys and queries are ordered by principal-axis trees in a balanced frame; every node of the
    key tree is a coarse key; each block of ``block_size`` similar queries opens nodes from the
    root down as long as the error that saves is worth the keys it costs. ``budget`` is the total
    cost relative to exact attention, trees and selection included: it sets the price of a key.
    With a ``tolerance`` instead, the price is the highest found whose measured error, on rows of
    sampled blocks and at its upper limit (95 % confidence), is within it.

    ``order`` says how queries and keys come into blocks: by a "tree", by "groups" around the
    clusters they lie in, in the "sequence" they have, or "auto". With "places" they stay as they
    come, in blocks of a quarter of ``block_size``, without a frame and in no other order: that
    suits text. On a CPU "auto" tries it beside the others and measures. ``tail`` says what becomes
    of keys that no list can afford: they are seen as "coarse" keys, or all keys are seen through a
    "polynomial" fitted to the scores, which suits diffuse heads; "auto" measures both. Causal
    windows are ordered by trees or in places; the plan says so where another order was asked for.

    Where nothing within the budget is any good, the head is exact and the plan says so.
    No bound is proved: coarse keys are judged by estimates, and the certificate measures.
    """

    budget: float | None = None  # 0.1 where there is no tolerance either
    block_size: int | None = None  # 64, or 128 where a GPU's kernels take them
    order: str = "auto"
    tail: str = "auto"
    tolerance: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.budget is not None and self.tolerance is not None:
            raise InputError("budget and tolerance are both given; expected one of them")
        if self.tolerance is None:
            object.__setattr__(self, "budget", 0.1 if self.budget is None else self.budget)
        for name in ("budget", "tolerance"):
            value = getattr(self, name)
            if value is None:
                continue
            if not is_positive(value):
                raise InputError(f"{name} must be a finite number > 0, got {value!r}")
            object.__setattr__(self, name, float(value))
        size = self.block_size
        if size is not None and (type(size) is not int or not 1 <= size <= LARGEST_BLOCK):
            raise InputError(
                f"block_size must be an integer from 1 to {LARGEST_BLOCK}, got {size!r}"
            )
        for name, choices in (("order", (*ORDERS, PLACES)), ("tail", TAILS)):
            value = getattr(self, name)
            if value not in choices:
                raise InputError(f"{name} must be one of {', '.join(choices)}; got {value!r}")
        object.__setattr__(self, "seed", check_seed(self.seed))

    def plan_head(self, head: Head) -> HeadPlan:
        if self.tail == "auto" and self.budget is not None and self.budget >= 1:
            return exact_plan(head, f"a budget of {self.budget:g} buys all keys")
        found, failures, clock = [], [], SearchTime(head)
        for search in self._searches(head):
            if isinstance(search, str):
                failures.append(search)
                continue
            if clock.is_up:
                break
            plan = self._best(search, head, clock)
            if plan is None:
                wish = f"a budget of {self.budget:g}" if self.budget else f"{self.tolerance:g}"
                failures.append(f"no {search.NAME} within {wish}")
            elif plan.cost >= 1:
                failures.append(f"{search.NAME} would cost as much as all keys")
            elif plan.measured is not None and plan.measured >= USELESS:
                failures.append(f"{search.NAME} within {self.budget:g} err by {plan.measured:.2g}")
            else:
                found.append(plan)
        if clock.is_up:
            failures.append(clock.GIVEN_UP)
            found = [replace(plan, reason=plan.reason or clock.GIVEN_UP) for plan in found]
        if not found:
            return exact_plan(head, "; ".join(dict.fromkeys(failures)))
        if self.budget is None:
            return max(found, key=lambda plan: plan.speedup)
        return min(found, key=lambda plan: plan.measured or 0.0)

    def _searches(self, head: Head) -> Iterator[BlockSearch | FittedSearch | str]:
        if self.tail != "polynomial":
            order = self.order
            if order == "auto" and handling(head) is not ENGINE:
                order = "tree"  # groups would be left to PyTorch
            size = self.block_size or (BLOCK if handling(head, order) is ENGINE else DEVICE_BLOCK)
            first = BlockSearch.of(head, size, self.seed, order)
            yield first
            if isinstance(first, BlockSearch):
                yield from self._further(first, size)
        if self.tail != "coarse":
            yield FittedSearch.of(head, self.seed)

    def _further(self, first: BlockSearch, size: int) -> Iterator[BlockSearch | str]:
        """Lists in other orders, where the choice is ours; kernels know those of trees."""
        head = first.head
        if self.order == PLACES:
            yield BlockSearch.in_places(head, size, self.seed, looks=True)
        elif self.order == "auto" and not head.query.is_cuda:
            for looks in (True, False):
                yield BlockSearch.in_places(head, size, self.seed, looks)
        elif self.order == "auto" and not head.is_causal and first.order != SEQUENCE:
            yield BlockSearch.of(head, size, self.seed, SEQUENCE)

    def _best(
        self, search: BlockSearch | FittedSearch, head: Head, clock: SearchTime
    ) -> HeadPlan | None:
        """The best plan of one kind; with its error, if there is another kind to compare with."""
        if self.tolerance is not None:
            if isinstance(search, BlockSearch):
                return search.within(self.tolerance, self.seed, clock)
            return search.within(self.tolerance, RowCheck(head, self.tolerance, self.seed), 0.0)
        assert self.budget is not None
        plan = search.affordable(self.budget)
        if plan is None or (self.tail != "auto" and self.order not in ("auto", PLACES)):
            return plan
        if isinstance(search, BlockSearch):
            return search.measured(plan, self.seed)
        return search.measured(plan)


@dataclass(frozen=True, eq=False)
class BlockSearch:
    """Plans of one head at any price, costed on a sample of its blocks."""

    NAME: ClassVar = "lists"
    head: Head
    base: HeadPlan
    whole: Structure
    sample: Structure

    @staticmethod
    def of(head: Head, block_size: int, seed: int, order: str = "auto") -> BlockSearch | str:
        """The search, or why there can be none."""
        keys = head.m if head.live_keys is None else len(head.live_keys)
        if head.n < 2 * block_size or keys < 4 * LEAF:
            return "there are too few tokens for blocks and trees"
        if not head.value_dim:
            return "values have no entries"
        frame = own_frame(head)
        if not frame.spread < LARGEST_SCORES:
            return "scores are so large that one key takes it all"
        if order == PLACES:
            return BlockSearch.in_places(head, block_size, seed)
        reason = ""
        if head.is_causal and order not in ("auto", "tree"):
            order, reason = "tree", f"causal windows are ordered by trees, not by {order!r}"
        settings = BlockSettings(1.0, block_size, LEAF, chunk_of(head.n, block_size), order)
        base = HeadPlan(
            "block", reason, head.n, head.m, 1.0, 1.0,
            blocks=settings, frame=frame, exact_rows=prefix_of(head) or 0,
        )  # fmt: skip
        made = remembered(head, frame, settings)
        if not head.is_causal and order == "auto" and made.order != order:
            # what was found is a part of the plan: whoever runs it need not look again
            settings = replace(settings, order=made.order)
            head.memory[frame, replace(settings, price=0.0)] = made
            base = replace(base, blocks=settings)
        return BlockSearch(head, base, made, made.sample(SAMPLED_BLOCKS, seed))

    @property
    def order(self) -> str:
        """Of queries and keys, as far as it is known."""
        assert self.base.blocks is not None
        return self.base.blocks.order

    @staticmethod
    def in_places(head: Head, block_size: int, seed: int, looks: bool = False) -> BlockSearch:
        """Smaller blocks of consecutive queries, which cost little to judge; ``looks``: rows are
        computed to see which places matter."""
        size = max(1, block_size // PARTS)
        profile = Profile.of(head, LEAF, looks)
        settings = BlockSettings(1.0, size, LEAF, math.lcm(size, LEAF), PLACES, profile)
        frame = plain_frame(head)
        base = HeadPlan("block", "", head.n, head.m, 1.0, 1.0, blocks=settings, frame=frame)
        made = remembered(head, frame, settings)
        return BlockSearch(head, base, made, made.sample(PARTS * SAMPLED_BLOCKS, seed))

    def plan(self, price: float) -> HeadPlan:
        """The plan at a price, with its cost."""
        settings = self.base.blocks
        assert settings is not None
        keys = float(settings.chunk) / 2 if self.head.is_causal else 0.0
        coarse, visited, listed, tilted = 0.0, 0.0, 0.0, 0.0
        leaf = self.sample.forest.leaf_size
        for layer, lists, whole in zip(
            self.sample.layers, self.sample.select(price), self.whole.layers, strict=True
        ):
            share = len(whole.cells.mean) / max(1, len(layer.cells.mean))
            blocks = len(whole.owner) / max(1, len(layer.owner))
            rows = layer.rows.shape[1] * blocks / self.head.n
            few, many = (count[layer.owner].double().sum() for count in lists.lengths(leaf))
            coarse, keys = coarse + float(few) * rows, keys + float(few + many) * rows
            tilted, listed = tilted + float(few) * blocks, listed + float(few + many) * blocks
            visited += lists.visited * share
        exact = self.base.exact_rows**2 / 2 / max(1, self.head.n)
        made = self.whole
        sizes = ListSizes(
            made.levels, made.axes, keys + exact, coarse, int(visited), listed, tilted,
            made.compared, len(made.layers),
        )  # fmt: skip
        work = block_work(self.head, settings, sizes)
        return replace(
            self.base,
            blocks=replace(settings, price=price),
            keys=keys,
            cost=work.cost(self.head),
            speedup=work.speedup(self.head),
        )

    @staticmethod
    def highest_speedup(head: Head, block_size: int, order: str) -> float:
        """What lists could reach at best, before anything is built."""
        block_size = max(1, block_size // PARTS) if order == PLACES else block_size
        settings = BlockSettings(1.0, block_size, LEAF, chunk_of(head.n, block_size), order)
        levels = leaf_layout(head.n, block_size)[0] + leaf_layout(head.m, LEAF)[0] + 2
        visited, nodes = START_NODES * math.ceil(head.n / block_size), float(START_NODES)
        sizes = ListSizes(levels, 1, nodes, nodes, visited, visited, visited)
        return block_work(head, settings, sizes).speedup(head)

    def affordable(self, budget: float) -> HeadPlan | None:
        """The plan of the lowest price within the budget."""
        low, high = LEAST, MOST
        found = self.plan(math.exp(high))
        if found.cost > budget:
            return None
        for _ in range(STEPS):
            middle = (low + high) / 2
            finer = self.plan(math.exp(middle))
            if finer.cost <= budget:
                found, high = finer, middle
            else:
                low = middle
        return found

    def measured(self, plan: HeadPlan, seed: int) -> HeadPlan:
        """The plan with its error on sampled blocks."""
        assert plan.blocks is not None
        check = BlockCheck.draw(self.whole, self.head, plan.blocks.chunk, seed)
        return replace(plan, measured=check.error(plan.blocks.price)[0])

    def within(
        self, tolerance: float, seed: int, clock: SearchTime, speedup: float = 0.0
    ) -> HeadPlan | None:
        """The plan of the highest price found whose measured error, at its upper limit, is within
        tolerance; None where there is none cheaper than exact attention and predicted to be faster
        than ``speedup``: such prices are not tried. None, too, if time is up before one is found.

        Errors fall slowly with the price, so prices are tried in large steps, then in halves.
        """
        plans: dict[float, HeadPlan] = {}

        def pays(log_price: float) -> bool:
            if log_price not in plans:
                plans[log_price] = self.plan(math.exp(log_price))
            return plans[log_price].cost < 1 and plans[log_price].speedup > speedup

        at = min(MOST, 2 * math.log(tolerance / FIRST_GUESS))
        while at < MOST and not pays(at):
            at = min(MOST, at + STRIDE)
        if not pays(at):
            return None
        assert self.base.blocks is not None
        check = BlockCheck.draw(self.whole, self.head, self.base.blocks.chunk, seed, tolerance)
        measured: dict[float, float] = {}

        def holds(log_price: float) -> bool:
            measured[log_price], limit = check.error(math.exp(log_price))
            return limit <= tolerance

        good = bad = None
        step = STRIDE
        while good is None or bad is None:
            if holds(at):
                good = at
                if at == MOST:
                    break
            else:
                bad = at
            if good is None and not pays(_hoped(at, measured[at] / tolerance)):
                break
            while good is None and step > 1 and not pays(at - step):
                step /= 2
            at = min(MOST, at + STRIDE) if bad is None else at - step
            if at < LEAST or clock.is_up or not pays(at):
                break
        if good is None:
            return None
        for _ in range(HALVES if bad is not None else 0):
            assert bad is not None
            if clock.is_up:
                break
            middle = (good + bad) / 2
            good, bad = (middle, bad) if holds(middle) else (good, middle)
        return self._verified(good, tolerance, seed, pays, clock)

    def _verified(
        self,
        log_price: float,
        tolerance: float,
        seed: int,
        pays: Callable[[float], bool],
        clock: SearchTime,
    ) -> HeadPlan | None:
        """The plan of this price, or of one a little lower, that is also within tolerance on rows
        that are drawn one by one, most of them unlike the others; None if there is none."""
        assert self.base.blocks is not None
        sample = RowSample.draw(self.head, CHECKED_ROWS, seed)
        check = BlockCheck.of_rows(self.whole, self.base, self.head, sample, tolerance)
        for attempt in range(TRIES):
            measured, limit = check.error(math.exp(log_price))
            if limit <= tolerance:
                return replace(self.plan(math.exp(log_price)), measured=measured)
            log_price = min(_hoped(log_price, limit / tolerance), log_price - 2.0**attempt)
            if clock.is_up or not pays(log_price):
                break
        return None


def _hoped(log_price: float, excess: float) -> float:
    """The highest price at which an error could be so many times smaller."""
    return max(LEAST, log_price - math.log(max(1.0, excess)) / STEEPEST)


def chunk_of(n: int, block_size: int) -> int:
    """Positions that see each other exactly: a power of two near n / 64."""
    wish = max(2 * block_size, LEAF, min(512, n // 64))
    return int(2 ** math.floor(math.log2(wish)))
