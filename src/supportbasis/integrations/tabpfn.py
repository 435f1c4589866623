"""An attention backend of TabPFN (8.3 or newer).

TabPFN offers a backend the shapes of a call, not its layer. So plans are kept by shape, in the
order of calls, and each is checked on sampled rows whenever it is used: a call whose measured error
is beyond the tolerance is planned anew. After the last plan comes the first one again, if it
serves. Checking takes 128 rows of exact attention.
"""

from __future__ import annotations

import warnings
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from ..accuracy.sampling import RowSample, exact_rows
from ..api import attention
from ..api import plan as make_plan
from ..errors import InputError
from ..methods import Auto
from ..methods.planning import plan_of
from ..plans import Plan
from ..problem.validation import attention_problem

NAME = "support_basis"
LEAST = {"cuda": 32768}  # rows from which on calls are taken
CPU_LEAST = 8192
KEPT = 64  # plans of a shape: layers of a model
ROWS = 128  # of a head, on which a plan is checked
WIDEST = 256  # head dimension

Shape = tuple[Any, ...]


class Backend:
    """What `register` registers. ``calls`` counts those that arrived, ``planned`` those for which
    a plan was made, ``exact`` those whose plan was exact in every head."""

    def __init__(self, tolerance: float, min_tokens: int | None, name: str) -> None:
        self.name, self.method, self.min_tokens = name, Auto(tolerance), min_tokens
        self.counts: Counter[str] = Counter()
        self._plans: dict[Shape, list[Plan]] = {}
        self._turn: dict[Shape, int] = {}

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
        """Whether a call is long enough, with keys in full precision and no gradients."""
        least = self.min_tokens
        if least is None:
            least = LEAST.get(spec.device.type, CPU_LEAST)
        lengths = (spec.seq_len_q, spec.seq_len_kv)
        return (
            None not in lengths and min(lengths) >= least and spec.head_dim <= WIDEST
            and spec.quantized_kv_dtype is None and not spec.is_grad_enabled
            and spec.num_heads % spec.num_kv_heads == 0
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
        output = self._kept(shape, query, key, value, grouped)
        return self._new(shape, query, key, value, grouped) if output is None else output

    def _kept(
        self, shape: Shape, query: Tensor, key: Tensor, value: Tensor, grouped: bool
    ) -> Tensor | None:
        """The output by the plan whose turn it is, if there is one and it serves."""
        plans, turn = self._plans.setdefault(shape, []), self._turn.get(shape, 0)
        if turn == KEPT or (turn == len(plans) and plans and not plans[0].is_exact):
            turn = 0  # perhaps the first layer again
        if turn == len(plans):
            return None
        output = self._checked(plans[turn], query, key, value, grouped)
        if output is not None:
            self._turn[shape] = turn + 1
        return output

    def _new(
        self, shape: Shape, query: Tensor, key: Tensor, value: Tensor, grouped: bool
    ) -> Tensor:
        """The output by a new plan, which is kept for this turn."""
        plan = make_plan(query, key, value, enable_gqa=grouped, method=self.method)
        self.counts["planned"] += 1
        self.counts["exact"] += plan.is_exact
        plans, turn = self._plans[shape], self._turn.get(shape, 0) % KEPT
        plans[turn : turn + 1] = [plan]
        self._turn[shape] = turn + 1
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
            return output.transpose(1, 2)
        for batch, number, head in problem.each_head():
            sample = RowSample.draw(head, ROWS, 0)
            exact = exact_rows(head, sample.rows, dtype=torch.float32)
            wrong = output[batch, number, sample.rows].float() - exact
            sizes = (x.double().square().sum(1) for x in (wrong, exact))
            if sample.frobenius_limit(*sizes)[0] > self.method.tolerance:
                return None
        return output.transpose(1, 2)


def register(tolerance: float = 0.03, min_tokens: int | None = None, name: str = NAME) -> Backend:
    """Register a backend that TabPFN prefers for long attention without gradients.

    ``tolerance`` is the relative error of a head's output, as of `Auto`. Calls with fewer than
    ``min_tokens`` rows (None: 8192 on a CPU, 32768 on a GPU) run as they did. The backend counts
    its calls; `unregister` removes it.
    """
    if min_tokens is not None and (type(min_tokens) is not int or min_tokens < 0):
        raise InputError(f"min_tokens must be an integer >= 0, got {min_tokens!r}")
    backends = _backends()
    unregister(name)
    backend = Backend(tolerance, min_tokens, name)
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
