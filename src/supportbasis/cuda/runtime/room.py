"""Room for what only entries decide: how long lists are, how many rows are computed alone.

A call with a plan never waits for such a count. It has room for what was needed before and some
more, the device computes everything exactly where that is not enough, and the host hears of it
when the next call comes. Only the first call of a plan waits, until it knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from ...errors import InputError
from ...plans import Plan
from ...problem.caching import WeakCache
from ...problem.problem import Problem
from ..exact.rectangle import Rectangle, Tokens, exact_rows
from .language import cdiv, power_of_two
from .report import Report, capturing

Result = TypeVar("Result")
Sizes = tuple[int, ...]


class Room:
    """Sizes that the calls of one plan have had so far."""

    def __init__(self, usual: Sizes) -> None:
        self.sizes, self.known = usual, False
        self.told: list[int] = []  # what the last call that was heard of says beside its sizes
        self._report = Report()

    @staticmethod
    def of(plan: Plan, problem: Problem, usual: Sizes) -> Room:
        """The one that is kept with a plan for such calls."""
        query = problem.query
        key = (query.device, query.shape, problem.m, problem.key_log_weight is None)
        room = _kept.get(plan, key, lambda: Room(usual))
        if not room.known and capturing():
            raise InputError(
                "plan: it has not run on such tensors yet, and what it needs is not known; call "
                "once before a CUDA graph is recorded"
            )
        return room

    def run(self, work: Callable[[Sizes, bool], tuple[Result, Tensor]]) -> Result:
        """What ``work(sizes, sure)`` returns beside the sizes that it needed and what else it
        tells; it has to be ``sure`` of its result for whatever sizes, unless the host looks at
        them at once."""
        if capturing():
            return work(self.sizes, True)[0]
        if self.known:
            needed_before = self._report.read()
            if needed_before is not None:
                self._grow(needed_before.tolist())
            result, needed = work(self.sizes, True)
            if not self._report.pending:
                self._report.send(needed)
            return result
        while True:
            result, needed = work(self.sizes, False)
            if not self._grow(needed.tolist()):
                self.known = True
                return result

    def again(self, work: Callable[[Sizes, bool], tuple[Result, Tensor]]) -> Result:
        """`run` on the way back: with the room that the way there had, so that what did not fit
        there does not fit here. (If the plan was called again in between, there may be more.)"""
        return work(self.sizes, True)[0] if self.known else self.run(work)

    def _grow(self, needed: list[int]) -> bool:
        """Whether there has to be more room than there was."""
        before = self.sizes
        needed, self.told = needed[: len(before)], needed[len(before) :]
        self.sizes = tuple(
            size if need <= size else with_spare(need)
            for size, need in zip(before, needed, strict=True)
        )
        return self.sizes != before


_kept: WeakCache[Plan, tuple[torch.device, torch.Size, int, bool], Room] = WeakCache()


def with_spare(need: int) -> int:
    """A quarter more, in steps so coarse that calls which need about as much have the same."""
    step = max(16, power_of_two(need) // 8)
    return cdiv(need + need // 4, step) * step


def enough(needed: Tensor, sizes: Sizes) -> Tensor:
    """Whether everything fits, on the device."""
    pairs = zip(needed.unbind(), sizes, strict=True)
    return torch.stack([need <= size for need, size in pairs]).all()


def marked(flags: Tensor, most: int) -> Tokens:
    """The first tokens that are flagged in each head [heads, tokens]."""
    heads, tokens = flags.shape
    at = flags.cumsum(1) - 1
    at = torch.where(flags & (at < most), at, most)
    place = torch.arange(tokens, dtype=torch.int32, device=flags.device).expand(heads, -1)
    index = place.new_zeros(heads, most + 1).scatter_(1, at, place)[:, :most].contiguous()
    return Tokens(most, index, flags.sum(1).clamp(max=most).int())


def all_unless(
    fits: Tensor,
    query: Tensor,
    key: Tensor,
    scale: float,
    log_weight: Tensor | None,
    precision: str,
    causal: bool = False,
) -> Rectangle:
    """All rows and keys where something did not fit, else no row."""
    batch, heads, n = query.shape[:3]
    everyone = torch.arange(n, dtype=torch.int32, device=query.device)
    count = ((~fits).int() * n).expand(batch * heads).contiguous()
    rows = Tokens(n, everyone.expand(batch * heads, -1).contiguous(), count)
    keys = Tokens(key.shape[2])
    return Rectangle(rows, keys, scale, causal, log_weight, precision=precision)


def exact_unless(
    fits: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    log_weight: Tensor | None,
    precision: str,
    output: Tensor,
    lse: Tensor,
    causal: bool = False,
) -> None:
    """Write all rows exactly where something did not fit; else that is one launch that ends."""
    rectangle = all_unless(fits, query, key, scale, log_weight, precision, causal)
    exact_rows(query, key, value, rectangle, output, lse)
