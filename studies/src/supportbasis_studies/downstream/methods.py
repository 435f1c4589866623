"""What the models are asked to attend by: the rows of the table."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from supportbasis.methods import Auto, BlockSupport, Method, MultiThreshold, SingleThreshold

from ..models import Attend, exact
from .emulation import SHARE, emulated
from .reuse import Reuse, Used

EXACT, MEAN = "exact", "mean(V)"
OURS = {4: "ours (4), emulation", 6: "ours (6), emulation"}
AS23 = {4: "AS23 (4), emulation", 6: "AS23 (6), emulation"}
REVISED = {name: name.replace("emulation", "revised emulation")
           for name in (*OURS.values(), *AS23.values())}  # fmt: skip


def mean_of_values(query: Tensor, key: Tensor, value: Tensor, scale: float, causal: bool) -> Tensor:
    """Every key the same: an attention that is broken."""
    n, m = query.shape[-2], key.shape[-2]
    if not causal:
        return value.mean(-2, keepdim=True).expand(*query.shape[:-1], -1)
    counts = torch.arange(1, m + 1, dtype=value.dtype, device=value.device)
    return (value.cumsum(-2) / counts.unsqueeze(-1))[..., m - n :, :]


@dataclass(frozen=True)
class Replacement:
    """A row of the table: its name, and the attention it stands for."""

    name: str
    attend: Attend
    used: Used = field(default_factory=Used)


LIBRARY: dict[str, Method] = {
    "SingleThreshold": SingleThreshold(),
    "MultiThreshold": MultiThreshold(),
    "BlockSupport(0.5)": BlockSupport(0.5),
    "Auto": Auto(),
}
SLOW = ("MultiThreshold", "BlockSupport(0.5)")  # what takes longest comes last


def replacement(name: str, layers: int | None = None) -> Replacement:
    """The row of this name, anew. A method of the library makes plans for a model with this many
    layers, which are used again; None: every call is planned."""
    if name in LIBRARY:
        reuse = Reuse(LIBRARY[name], layers)
        return Replacement(name, reuse, reuse.used)
    plain: dict[str, Attend] = {EXACT: exact, MEAN: mean_of_values}
    for names, share in ((OURS, SHARE), (AS23, 0.0)):
        for degree, first in names.items():
            plain[first] = emulated(degree, share)
            plain[REVISED[first]] = emulated(degree, share, revised=True)
    return Replacement(name, plain[name])


NAMES = (EXACT, *OURS.values(), *AS23.values(), *REVISED.values(), MEAN, *LIBRARY)
