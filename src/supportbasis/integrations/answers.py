"""Answers to the calls of a model by a method, or by plans."""

from __future__ import annotations

import warnings
from collections import Counter

from torch import Tensor

from ..api import attention
from ..errors import InputError
from ..methods import Auto, Exact, Method
from ..methods.base import check_is_method
from ..plans import ModelPlan, Plan
from .calls import Call
from .parts import continued, with_lse

SINGLE = 2  # tokens: a decoding step is exact


class Answers:
    """A handler of calls. Whatever is not answered by the method is exact, and counted.

    ``calls`` is the number of calls that arrived; ``approximated`` and ``exact`` count those that
    ran by the method or plan, and exactly, of each site.
    """

    def __init__(
        self,
        method: Method | None = None,
        plan: ModelPlan | Plan | None = None,
        min_tokens: int | None = None,
    ) -> None:
        check_is_method(method)
        if plan is not None and not isinstance(plan, ModelPlan | Plan):
            raise InputError(
                f"plan must be an sb.ModelPlan or sb.Plan, got a {type(plan).__name__} (ranges of "
                "timesteps are for sb.models.use)"
            )
        if method is not None and plan is not None:
            raise InputError("method and plan are both given; expected one of them")
        if min_tokens is not None and (type(min_tokens) is not int or min_tokens < 0):
            raise InputError(f"min_tokens must be an integer >= 0, got {min_tokens!r}")
        self.method = Auto() if method is None and plan is None else method
        self.plan, self.min_tokens = plan, min_tokens
        layers = plan.layers if isinstance(plan, ModelPlan) else ()
        self._by_name = {layer.name: number for number, layer in enumerate(layers)}
        self.approximated: Counter[int] = Counter()
        self.exact: Counter[int] = Counter()
        self._said: set[str] = set()

    def become(self, other: Answers) -> None:
        """Answer as another one does from now on, and count on."""
        self.method, self.plan = other.method, other.plan
        self.min_tokens, self._by_name = other.min_tokens, other._by_name

    @property
    def calls(self) -> int:
        """How many arrived."""
        return self.approximated.total() + self.exact.total()

    def count(self, call: Call, exactly: bool) -> None:
        """One more call of its site."""
        (self.exact if exactly else self.approximated)[call.site] += 1

    def __call__(self, call: Call) -> Tensor:
        if not self.approximates(call):
            return self._exact(call)
        if call.own is not None or call.reason or call.dropout:
            return self._exact(call, call.reason or ("it has dropout" if call.dropout else ""))
        plan, _ = self.plan_of(call)
        self.count(call, exactly=False)
        if call.is_causal and call.offset:
            return continued(call, self.method, plan)
        keys = min(call.n, call.m) if call.is_causal else call.m
        mask = call.attn_mask
        return attention(
            call.query, call.key[:, :, :keys], call.value[:, :, :keys],
            None if mask is None else mask[..., :keys], 0.0, call.is_causal, call.scale,
            call.group > 1, method=self.method, plan=plan,
        )  # fmt: skip

    def with_lse(self, call: Call) -> tuple[Tensor, Tensor]:
        """Output, and the log-sum-exp of scores [batch, heads, tokens]."""
        if call.dropout or (call.reason and call.row_mask is None):
            raise InputError(f"return_lse: {call.name} has none: {call.reason or 'it has dropout'}")
        if call.row_mask is not None:
            self._report(call, call.reason)
            self.count(call, exactly=True)
            keys = slice(0, call.m)
            return with_lse(call, keys, call.row_mask, call.is_causal, Exact(), None)
        plan, exactly = self.plan_of(call)[0], not self.approximates(call)
        self.count(call, exactly)
        method = Exact() if exactly else self.method
        return with_lse(
            call, slice(0, call.m), call.attn_mask, call.is_causal, method,
            None if exactly else plan,
        )  # fmt: skip

    def approximates(self, call: Call, tokens: tuple[int, int] | None = None) -> bool:
        """Whether a call is long enough for its plan or method, and its plan not exact. ``tokens``
        are queries and keys (None: those of the call)."""
        plan, least = self.plan_of(call)
        n, m = tokens or (call.n, call.m)
        if n < max(SINGLE, least) or m < least:
            return False
        return plan is None or not plan.is_exact

    def plan_of(self, call: Call) -> tuple[Plan | None, int]:
        """The plan of a call's site, and the tokens below which it is exact."""
        least = self.min_tokens or 0
        if not isinstance(self.plan, ModelPlan):
            return self.plan, least
        number = self._by_name.get(call.name, call.site)
        if number >= len(self.plan.layers):
            raise InputError(
                f"plan has {len(self.plan.layers)} layers, but attention number {call.site} "
                f"({call.name}) arrived: it was made for another model"
            )
        site = self.plan.layers[number]
        shape = (call.query.shape[1], call.query.shape[3])
        made_for = (site.plan.num_heads, site.plan.dim)
        if shape != made_for:
            raise InputError(
                f"plan: layer {number} ({site.name}) was made for (heads, dim) = {made_for}, but "
                f"{call.name} has {shape}: it belongs to another model"
            )
        return site.plan, site.min_tokens if self.min_tokens is None else least

    def _exact(self, call: Call, reason: str = "") -> Tensor:
        self.count(call, exactly=True)
        self._report(call, reason)
        return call.exact()

    def _report(self, call: Call, reason: str) -> None:
        if reason and reason not in self._said:
            self._said.add(reason)
            warnings.warn(
                f"supportbasis: {call.name} runs exactly because {reason}; other sites with this "
                "reason are not reported",
                UserWarning,
                stacklevel=4,
            )
