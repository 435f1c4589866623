"""An attention backend of TabPFN (8.3 or newer).

TabPFN offers a backend the shapes of a call, not its layer: plans cannot be keyed by layer. So they
are kept by shape, in the sequence of calls, and each is checked on sampled rows whenever it is
used: a call whose measured error is beyond the tolerance is planned anew (`Sequence`). Checking
takes 256 rows of exact attention; exact plans need none.
"""

from __future__ import annotations

import warnings
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..accuracy.sampling import RowSample, exact_rows
from ..api import attention
from ..api import plan as make_plan
from ..errors import InputError
from ..methods import Auto, Method
from ..methods.base import check_is_method
from ..methods.planning import plan_of
from ..plans import Plan
from ..problem.checks import check_number
from ..problem.validation import attention_problem
from .sdpa import is_overridden

NAME = "support_basis"
LEAST = {"cuda": 32768}  # rows from which on calls are taken
CPU_LEAST = 8192
KEPT = 64  # plans of a shape: layers of a model
ROWS = 256  # of a head, on which a plan is checked
MARGIN = 0.9  # of the tolerance, within which plans are made: few fail on other rows then
WIDEST = 256  # head dimension

Shape = tuple[Any, ...]


@dataclass(eq=False)
class Sequence:
    """Plans of one shape in the sequence of calls. After the last one the first layer is expected
    again. Whether an approximate plan serves it can be checked; an exact one serves any. So where
    the first plans are exact, the sequence ends where its first approximate plan serves again,
    after as many exact ones."""

    plans: list[Plan] = field(default_factory=list)
    turn: int = 0
    is_whole: bool = False  # the number of layers is known

    def next(self) -> int | None:
        """Number of the plan that may serve the next call."""
        if self.turn < len(self.plans):
            return self.turn
        if self.is_whole or len(self.plans) == KEPT:
            return 0
        exact = [plan.is_exact for plan in self.plans]
        if all(exact):
            return None
        first = exact.index(False)
        return first if all(exact[len(exact) - first :]) else None

    def served(self, number: int) -> None:
        """The plan served."""
        if number and self.turn == len(self.plans):  # the exact ones before it came again
            del self.plans[self.turn - number :]
            self.is_whole = True
        self.turn = number + 1

    def put(self, plan: Plan) -> None:
        """A new plan for the call whose turn it is."""
        self.turn %= KEPT
        self.plans[self.turn : self.turn + 1] = [plan]
        self.turn, self.is_whole = self.turn + 1, False


class Backend:
    """What `register` registers. ``calls`` counts those that arrived, ``planned`` those for which
    a plan was made, ``exact`` those whose plan was exact in every head."""

    def __init__(
        self, tolerance: float, min_tokens: int | None, name: str, method: Method | None
    ) -> None:
        check_number("tolerance", tolerance)
        check_is_method(method)
        self.name, self.tolerance, self.min_tokens = name, tolerance, min_tokens
        self.method = Auto(MARGIN * tolerance) if method is None else method
        self.counts: Counter[str] = Counter()
        self._kept: dict[Shape, Sequence] = {}

    @property
    def calls(self) -> int:
        return self.counts["calls"]

    @property
    def planned(self) -> int:
        return self.counts["planned"]

    @property
    def exact(self) -> int:
        return self.counts["exact"]

    def is_preferred(self, spec: Any) -> bool:
        """Whether a call is long enough, with keys in full precision and no gradients; not within
        `sb.models.use` or `sb.integrations.sdpa.override`, nor in compiled code."""
        least = self.min_tokens
        if least is None:
            least = LEAST.get(spec.device.type, CPU_LEAST)
        lengths = (spec.seq_len_q, spec.seq_len_kv)
        return (
            None not in lengths and min(lengths) >= least and spec.head_dim <= WIDEST
            and spec.quantized_kv_dtype is None and not spec.is_grad_enabled
            and spec.num_heads % spec.num_kv_heads == 0
            and not torch.compiler.is_compiling() and not is_overridden()
        )  # fmt: skip

    def run(
        self, q_BSHD: Tensor, k_BSJD: Tensor | None, v_BSJD: Tensor | None, *,
        quantized_kv: Any = None, **_: Any,
    ) -> Tensor:  # fmt: skip
        """Attention of [batch, tokens, heads, dim]."""
        if k_BSJD is None or v_BSJD is None or quantized_kv is not None:
            raise InputError("support_basis takes keys and values, not a quantised cache")
        self.counts["calls"] += 1
        query, key, value = (x.transpose(1, 2) for x in (q_BSHD, k_BSJD, v_BSJD))
        grouped = query.shape[1] != key.shape[1]
        shape = (*query.shape, *key.shape, query.dtype, query.device)
        kept = self._kept.setdefault(shape, Sequence())
        number = kept.next()
        if number is not None:
            output = self._checked(kept.plans[number], query, key, value, grouped)
            if output is not None:
                kept.served(number)
                return output.transpose(1, 2)
        plan = make_plan(query, key, value, enable_gqa=grouped, method=self.method)
        self.counts["planned"] += 1
        self.counts["exact"] += plan.is_exact
        kept.put(plan)
        return attention(query, key, value, enable_gqa=grouped, plan=plan).transpose(1, 2)

    def _checked(
        self, plan: Plan, query: Tensor, key: Tensor, value: Tensor, grouped: bool
    ) -> Tensor | None:
        """The output, if no head leaves the range of its plan and the measured error of each is
        within the tolerance. Its upper limit is not asked for: the plan met that when it
        was made, on more rows, and few of its heads would pass by another sample again."""
        problem = attention_problem(query, key, value, None, 0.0, False, None, grouped)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a plan that serves another layer
            if plan_of(problem, None, plan) is not plan:
                return None
        output = attention(query, key, value, enable_gqa=grouped, plan=plan)
        if plan.is_exact:
            self.counts["exact"] += 1
            return output
        for batch, number, head in problem.each_head():
            sample = RowSample.draw(head, ROWS, 0)
            exact = exact_rows(head, sample.rows, dtype=torch.float32)
            wrong = output[batch, number, sample.rows].float() - exact
            sizes = (x.double().square().sum(1) for x in (wrong, exact))
            if sample.frobenius_limit(*sizes)[0] > self.tolerance:
                return None
        return output


def register(
    tolerance: float = 0.03,
    min_tokens: int | None = None,
    name: str = NAME,
    *,
    method: Method | None = None,
) -> Backend:
    """Register a backend that TabPFN prefers for long attention without gradients.

    ``tolerance`` is the relative error of a head's output beyond which a call is planned anew;
    plans are made by ``method`` (None: `Auto` with nine tenths of the tolerance). Calls with fewer
    than ``min_tokens`` rows (None: 8192 on a CPU, 32768 on a GPU) run as they did. The backend
    counts its calls; `unregister` removes it by its ``name``.
    """
    if min_tokens is not None and (type(min_tokens) is not int or min_tokens < 0):
        raise InputError(f"min_tokens must be an integer >= 0, got {min_tokens!r}")
    backends, backend = _backends(), Backend(tolerance, min_tokens, name, method)
    others = backends.registered_attention_backends()
    if any(other.name == name and not isinstance(other, Backend) for other in others):
        raise InputError(f"name: TabPFN has a backend {name!r} already; choose another")
    unregister(name)
    backends.register_attention_backend(backend)
    return backend


def unregister(name: str = NAME) -> None:
    """Remove the backend of this name, if there is one."""
    _backends().unregister_attention_backend(name)


def _backends() -> Any:
    try:
        from tabpfn.architectures.shared import attention_backends
    except ImportError as error:
        raise InputError(
            f"tabpfn 8.3 or newer is needed ({error}): pip install 'supportbasis[tabpfn]'"
        ) from None
    return attention_backends
