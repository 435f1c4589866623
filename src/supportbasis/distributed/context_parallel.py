"""The public calls: attention, and its plan, over tokens that are sliced among ranks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import api
from ..engine.dispatch import of_heads
from ..engine.ranges import check_plan, check_scores
from ..errors import InputError
from ..methods import Auto, Exact, Method
from ..methods.base import check_is_method
from ..plans import ExactHead, Plan
from ..problem.caching import WeakCache
from ..problem.problem import Problem
from ..problem.validation import attention_problem
from .agreement import agreed, fingerprint
from .head_exchange import attend, plan_together
from .ranks import Ranks
from .ring import Ring
from .state_exchange import StateExchange
from .token_layout import Layout, TokenLayout, check_layout

Exchange = Literal["heads", "ring"]


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    is_causal: bool = False,
    method: Method | None = None,
    plan: Plan | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: Layout = "contiguous",
    exchange: Exchange | None = None,
) -> Tensor:
    """`sb.attention` of a sequence whose tokens are sliced among the ranks of a process group.

    Every rank passes its own tokens, [..., heads, own tokens, dim], of any number, and gets the
    output of its own queries: what `sb.attention` returns for them on one device, to rounding.
    ``attn_mask`` is a mask or bias of the own keys, [..., 1, own keys]. ``group`` is a process
    group or a DeviceMesh of one dim; None: all processes. ``layout`` says which tokens a rank holds
    (`split_tokens`): "contiguous", or "zigzag", which gives all ranks the same work in causal
    attention. In causal attention a rank holds queries and keys of the same tokens.

    What moves depends on the plan of each head. Polynomials, single thresholds and fitted
    polynomials exchange sums of features, whose size does not depend on the number of tokens, and
    their few large tokens. Other heads are exchanged for tokens: each rank gets whole sequences of
    some heads. Where there are fewer heads than ranks, exact heads run as a ring of key slices;
    others leave ranks idle. ``exchange="heads"`` or ``"ring"`` asks for one of these for all heads.

    Without a plan each call makes one, of the whole sequence, for which heads are exchanged for
    tokens; make it once by `sb.distributed.plan`. All ranks make the same calls in the same
    sequence, backward passes included; what they disagree about raises on every rank.
    """
    given = (query, key, value, attn_mask)
    options = _Options(is_causal, method, plan, scale, enable_gqa, layout, exchange)
    if torch.compiler.is_compiling():
        return torch.compiler.disable(_attention)(given, group, options)
    return _attention(given, group, options)


def plan(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    *,
    group: dist.ProcessGroup | DeviceMesh | None = None,
    is_causal: bool = False,
    method: Method | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    layout: Layout = "contiguous",
) -> Plan:
    """What `sb.plan` returns for the whole sequence, on every rank; each head is planned on one.

    Arguments are those of `sb.distributed.attention`."""
    options = _Options(is_causal, method, None, scale, enable_gqa, layout, None)
    ranks = Ranks(group)
    call = _agreed(ranks, (query, key, value, attn_mask), options)
    problem = replace(call.problem, is_reused=True)
    return _plan(replace(call, problem=problem), options)


@dataclass(frozen=True)
class _Options:
    is_causal: bool
    method: Method | None
    plan: Plan | None
    scale: float | None
    enable_gqa: bool
    layout: Layout
    exchange: Exchange | None

    def check(self) -> None:
        check_layout(self.layout)
        if self.exchange not in (None, "heads", "ring"):
            raise InputError(f"exchange must be 'heads', 'ring' or None, got {self.exchange!r}")
        check_is_method(self.method)
        if self.plan is None:
            return
        if not isinstance(self.plan, Plan):
            raise InputError(f"plan must be an sb.Plan, got {type(self.plan).__name__}")
        if self.method is not None and self.method != self.plan.method:
            raise InputError(
                f"method is {self.method} but the plan was made with {self.plan.method}"
            )


@dataclass(frozen=True, eq=False)
class _Call:
    """A validated call of this rank, and where all tokens are."""

    ranks: Ranks
    problem: Problem
    queries: TokenLayout
    keys: TokenLayout


def _attention(
    given: tuple[Tensor, Tensor, Tensor, Tensor | None],
    group: dist.ProcessGroup | DeviceMesh | None,
    options: _Options,
) -> Tensor:
    ranks = Ranks(group)
    call = _agreed(ranks, given, options)
    problem = call.problem
    with torch.autocast(problem.query.device.type, enabled=False):
        made = _plan(call, options) if options.plan is None else options.plan
        return problem.restore(_run(call, made, options.exchange))


def _agreed(
    ranks: Ranks, given: tuple[Tensor, Tensor, Tensor, Tensor | None], options: _Options
) -> _Call:
    """Validate the call on all ranks."""
    device = given[0].device if isinstance(given[0], Tensor) else torch.device("cpu")

    def make() -> tuple[Problem, Mapping[str, Any], tuple[int, ...]]:
        options.check()
        problem = _problem(given, options)
        return problem, _facts(problem, options), (problem.n, problem.m)

    problem, counts = agreed(ranks, device, make)
    queries, keys = (
        TokenLayout(tuple(lengths), options.layout) for lengths in zip(*counts, strict=True)
    )
    return _Call(ranks, problem, queries, keys)


def _problem(given: tuple[Tensor, Tensor, Tensor, Tensor | None], options: _Options) -> Problem:
    query, key, value, mask = given
    query, key, value = api.autocast(query, key, value)
    problem = attention_problem(
        query, key, value, mask, 0.0, options.is_causal, options.scale, options.enable_gqa
    )
    if problem.mask is not None:
        raise InputError(
            f"attn_mask has shape {tuple(problem.mask.shape)}; expected a mask or bias of the own "
            "keys, [..., 1, own keys]"
        )
    if options.is_causal and problem.n != problem.m:
        raise InputError(
            f"query has {problem.n} tokens and key {problem.m}; in causal attention a rank holds "
            "queries and keys of the same tokens"
        )
    if options.plan is not None:
        check_plan(problem, options.plan)
    if options.plan is not None or isinstance(options.method, Exact):
        check_scores(problem, options.plan)
    return problem


def _facts(problem: Problem, options: _Options) -> Mapping[str, Any]:
    """What all ranks must agree about."""
    weight = problem.key_log_weight
    return {
        "the leading dims": problem.leading,
        "the number of key heads": problem.key.shape[1],
        "the head dims of query and value": (problem.query.shape[3], problem.value.shape[3]),
        "the dtype": problem.query.dtype,
        "is_causal": options.is_causal,
        "scale": problem.given_scale,
        "layout": options.layout,
        "exchange": options.exchange,
        "method": options.method,
        "plan (its fingerprint)": options.plan and fingerprint(options.plan),
        "attn_mask is given": weight is not None,
        "gradients are recorded": problem.requires_grad,
        "gradients of attn_mask": weight is not None and weight.requires_grad,
    }


def _plan(call: _Call, options: _Options) -> Plan:
    problem, method = call.problem, options.method or Auto()
    if isinstance(method, Exact):
        whole = ExactHead(n=sum(call.queries.lengths), m=sum(call.keys.lengths))
        heads = (whole,) * problem.heads
        return Plan(method, problem.dim, heads, problem.given_scale, problem.is_causal)
    return plan_together(problem, method, call.ranks, call.queries, call.keys)


def _run(call: _Call, plan: Plan, exchange: Exchange | None) -> Tensor:
    """Each head by the exchange that suits its kind, [batch, heads, own tokens, dv]."""
    problem, ranks = call.problem, call.ranks
    state = None
    if exchange is None:
        state = StateExchange.of(problem, plan, ranks, call.queries, call.keys)
        plan = state.plan  # heads that leave the range of their plan are exact now
    by_state = [] if state is None else state.heads
    others = [h for h in range(problem.heads) if h not in by_state]
    exact = [h for h in others if isinstance(plan.heads[h], ExactHead)]
    if exchange == "ring" and len(exact) < len(others):
        raise InputError(
            "exchange='ring' takes exact heads only: an approximation of each slice of the keys "
            "would not be that of the whole; use method=sb.Exact()"
        )
    is_ring = exchange == "ring" or (exchange is None and len(exact) < ranks.size)
    in_ring = exact if is_ring else []
    whole = [h for h in others if h not in in_ring]
    parts = [(by_state, state.attend())] if state is not None and by_state else []
    parts += [
        (heads, run(call, plan, heads))
        for heads, run in ((in_ring, _ring), (whole, _heads))
        if heads
    ]
    return _joined(parts)


def _heads(call: _Call, plan: Plan, heads: list[int]) -> Tensor:
    problem, made = _part(call.problem, plan, heads)
    return attend(problem, made, call.ranks, call.queries, call.keys)


def _ring(call: _Call, plan: Plan, heads: list[int]) -> Tensor:
    problem, made = _part(call.problem, plan, heads)
    return Ring(problem, made, call.ranks, call.queries, call.keys).attend()


def _part(problem: Problem, plan: Plan, heads: list[int]) -> tuple[Problem, Plan]:
    """The problem and the plan of some heads."""
    if len(heads) == problem.heads:
        return problem, plan
    index = torch.tensor(heads, device=problem.query.device)
    made = _parts.get(plan, tuple(heads), lambda: plan.with_heads(plan.heads[h] for h in heads))
    return of_heads(problem, index), made


_parts: WeakCache[Plan, tuple[int, ...], Plan] = WeakCache()  # evaluators cache by plan


def _joined(parts: list[tuple[list[int], Tensor]]) -> Tensor:
    """All heads in order."""
    if len(parts) == 1:
        return parts[0][1]
    order = torch.tensor([h for heads, _ in parts for h in heads])
    whole = torch.cat([output for _, output in parts], 1)
    return whole.index_select(1, order.argsort().to(whole.device))
