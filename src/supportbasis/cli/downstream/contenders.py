"""What the models are asked to attend by: the rows of the table."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...api import attention
from ...api import plan as make_plan
from ...methods import Auto, BlockSupport, Method, MultiThreshold, SingleThreshold
from .emulation import emulated
from .hook import Attend, exact

EXACT, MEAN = "exact", "mean(V)"
OURS = {4: "ours (4), emulation", 6: "ours (6), emulation"}
AS23 = {4: "AS23 (4), emulation", 6: "AS23 (6), emulation"}


def mean_of_values(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    """Every key the same: an attention that is broken."""
    n, m = query.shape[-2], key.shape[-2]
    if not causal:
        return value.mean(-2, keepdim=True).expand(*query.shape[:-1], -1)
    counts = torch.arange(1, m + 1, dtype=value.dtype, device=value.device)
    return (value.cumsum(-2) / counts.unsqueeze(-1))[..., m - n :, :]


@dataclass
class Used:
    """What a method of the library did: how many heads ran exactly, and the mean cost."""

    heads: int = 0
    exact: int = 0
    cost: float = 0.0

    @property
    def exact_share(self) -> float | None:
        return self.exact / self.heads if self.heads else None

    @property
    def mean_cost(self) -> float | None:
        return self.cost / self.heads if self.heads else None


@dataclass(frozen=True)
class Contender:
    """A row of the table: its name, and the attention it stands for."""

    name: str
    attend: Attend
    used: Used = field(default_factory=Used)


def by_library(name: str, method: Method) -> Contender:
    """A method of the library; single queries of a model that writes run exactly."""
    used = Used()

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
        if causal and query.shape[-2] != key.shape[-2]:
            return exact(query, key, value, scale, causal)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what went wrong shows in the answers
            plan = make_plan(query, key, value, is_causal=causal, scale=scale, method=method)
            output = attention(query, key, value, is_causal=causal, scale=scale, plan=plan)
        used.heads += len(plan.heads)
        used.exact += sum(head.kind == "exact" for head in plan.heads)
        used.cost += plan.cost * len(plan.heads)
        assert isinstance(output, Tensor)
        return output

    return Contender(name, attend, used)


LIBRARY: dict[str, Method] = {
    "SingleThreshold": SingleThreshold(),
    "MultiThreshold": MultiThreshold(),
    "BlockSupport(0.5)": BlockSupport(0.5),
    "Auto": Auto(),
}
SLOW = ("SingleThreshold", "MultiThreshold", "BlockSupport(0.5)")  # plan longer than they compute


def contender(name: str) -> Contender:
    """The row of this name, anew: what a method of the library used is counted from here."""
    if name in LIBRARY:
        return by_library(name, LIBRARY[name])
    plain: dict[str, Attend] = {EXACT: exact, MEAN: mean_of_values}
    plain |= {name: emulated(degree) for degree, name in OURS.items()}
    plain |= {name: emulated(degree, share=0.0) for degree, name in AS23.items()}
    return Contender(name, plain[name])


NAMES = (EXACT, *OURS.values(), *AS23.values(), MEAN, *LIBRARY)
