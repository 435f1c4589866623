"""Calls of a model whose tokens are sliced among ranks: every rank runs the model on its own
tokens, and only attention sees the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..distributed import attention
from ..distributed.agreement import agreed
from ..distributed.context_parallel import Exchange
from ..distributed.ranks import Ranks
from ..distributed.token_layout import Layout, check_layout
from ..errors import InputError
from ..methods import Exact, Method
from ..plans import ModelPlan, Plan
from .answers import Answers
from .calls import Call

Group = dist.ProcessGroup | DeviceMesh


class SlicedAnswers(Answers):
    """A handler of calls on every rank of a group, all of whose ranks make the same calls."""

    def __init__(
        self,
        method: Method | None,
        plan: ModelPlan | Plan | None,
        min_tokens: int | None,
        group: Group,
        layout: Layout,
    ) -> None:
        super().__init__(method, plan, min_tokens)
        check_layout(layout)
        Ranks(group)  # raises where it is no group of this process
        self.group, self.layout = group, layout

    def __call__(self, call: Call) -> Tensor:
        return answer(self, call, self.group, self.layout)


def answer(
    answers: Answers,
    call: Call,
    group: Group,
    layout: Layout = "contiguous",
    exact_by: Exchange | None = None,
) -> Tensor:
    """The output of the own queries over the keys of all ranks.

    Lengths are compared with those of the plan as of the whole sequence. ``exact_by`` is the
    exchange of exact calls.
    """
    if torch.compiler.is_compiling():
        return torch.compiler.disable(_answer)(answers, call, group, layout, exact_by)
    return _answer(answers, call, group, layout, exact_by)


def _answer(
    answers: Answers, call: Call, group: Group, layout: Layout, exact_by: Exchange | None
) -> Tensor:
    def make() -> tuple[Call, Mapping[str, Any], tuple[int, ...]]:
        _check(call)
        facts = {
            "the attention module": call.name,
            "min_tokens": answers.min_tokens,
            "the kind of its plan": type(answers.plan).__name__,
        }
        return call, facts, (call.n, call.m, call.key_mask is not None)

    _, counts = agreed(Ranks(group), call.query.device, make, 3)
    n, m, masks = (sum(each) for each in zip(*counts, strict=True))
    if masks and call.key_mask is None:  # another rank has padding
        there = torch.ones(1, dtype=torch.bool, device=call.key.device)
        call = replace(call, key_mask=there.expand(len(call.key), call.m))
    method, plan = answers.method, answers.plan_of(call)[0]
    exactly = not answers.approximates(call, (n, m))
    answers.count(call, exactly)
    if exactly:
        method, plan = Exact(), None
    return attention(
        call.query, call.key, call.value, call.attn_mask, group=group, is_causal=call.is_causal,
        method=method, plan=plan, scale=call.scale, enable_gqa=call.group > 1, layout=layout,
        exchange=exact_by if isinstance(method, Exact) else None,
    )  # fmt: skip


def _check(call: Call) -> None:
    """What one device leaves to the model's own attention has no answer over sliced tokens."""
    reason = call.reason or ("it has dropout" if call.dropout else "")
    if call.is_causal and (call.offset or call.n != call.m):
        reason = reason or "its queries continue a cache"
    if call.own is not None:
        reason = reason or "its mask depends on the query"
    if reason:
        raise InputError(f"{call.name} has no attention over sliced tokens, because {reason}")
