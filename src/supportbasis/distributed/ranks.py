"""`Ranks`: the processes of a call, and the one exchange that everything else is made of.

Every collective here is an all-to-all with parts of any size: a gather sends the same part to all
ranks, a ring sends one part to the next rank. So bytes are counted and failures are reported in one
place. Exchanges have no gradients of their own: whoever calls them sends gradients back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..errors import InputError, SupportBasisError


@dataclass
class Traffic:
    """Bytes that this process sent to others, and in how many exchanges."""

    bytes: int = 0
    exchanges: int = 0


_counting: list[Traffic] = []


@contextmanager
def traffic() -> Iterator[Traffic]:
    """Count what this process sends to other ranks within the block, backward passes included.

    >>> import supportbasis as sb
    >>> with sb.distributed.traffic() as sent:
    ...     pass
    >>> sent.bytes, sent.exchanges
    (0, 0)
    """
    found = Traffic()
    _counting.append(found)
    try:
        yield found
    finally:
        _counting[:] = [each for each in _counting if each is not found]


class Ranks:
    """The ranks of a process group, or of a one-dimensional DeviceMesh (None: all processes)."""

    def __init__(self, group: dist.ProcessGroup | DeviceMesh | None):
        if not dist.is_available() or not dist.is_initialized():
            raise InputError(
                "torch.distributed has no process group: start the program by torchrun and call "
                "torch.distributed.init_process_group first"
            )
        self.group = _process_group(group)
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        if self.rank < 0:
            raise InputError("group does not contain this process; only its ranks make the call")

    def exchange(self, parts: Sequence[Tensor], counts: Sequence[int]) -> list[Tensor]:
        """Send ``parts[r]`` to rank r; ``counts[r]`` entries come from it, as flat tensors."""
        flat = [part.detach().reshape(-1) for part in parts]
        if self.size == 1:
            return flat
        sent = torch.cat(flat)
        received = sent.new_empty(sum(counts))
        self._count(flat, sent.element_size())
        with self.reporting("exchange"):
            dist.all_to_all_single(
                received, sent, list(counts), [x.numel() for x in flat], group=self.group
            )
        return list(received.split(list(counts)))

    def gather(self, x: Tensor) -> list[Tensor]:
        """The tensors of all ranks, which have the same shape."""
        return self.gather_parts([x] * self.size)

    def gather_parts(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Send ``parts[r]`` to rank r, all of one shape; those for this rank."""
        shape = parts[0].shape
        found = self.exchange(parts, [shape.numel()] * self.size)
        return [part.view(shape) for part in found]

    def gather_objects(self, item: Any) -> list[Any]:
        """What all ranks give, as Python objects."""
        found: list[Any] = [None] * self.size
        with self.reporting("exchange of objects"):
            dist.all_gather_object(found, item, group=self.group)
        return found

    def shift(self, x: Tensor, count: int) -> Tensor:
        """Send a flat tensor to the next rank; ``count`` entries come from the one before."""
        parts, counts = [x.new_empty(0)] * self.size, [0] * self.size
        parts[(self.rank + 1) % self.size] = x
        counts[(self.rank - 1) % self.size] = count
        return self.exchange(parts, counts)[(self.rank - 1) % self.size]

    def _count(self, parts: Sequence[Tensor], size: int) -> None:
        away = sum(part.numel() for part in parts) - parts[self.rank].numel()
        for each in _counting:
            each.bytes += away * size
            each.exchanges += 1

    @contextmanager
    def reporting(self, what: str) -> Iterator[None]:
        """Failures of the transport as errors that say what they mean."""
        try:
            yield
        except RuntimeError as error:
            raise SupportBasisError(
                f"rank {self.rank} of {self.size}: the {what} failed, because another rank has "
                "ended, raised an error or did not make the same call within the timeout of the "
                f"process group: {error}"
            ) from error


def _process_group(group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup:
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or tuple(f"dim {i}" for i in range(group.ndim))
            raise InputError(
                f"group is a DeviceMesh of {group.ndim} dims ({', '.join(names)}); pass the one "
                "along which tokens are sliced, such as mesh['context']"
            )
        return group.get_group()
    if group is None:
        default = dist.group.WORLD
        assert default is not None
        return default
    if not isinstance(group, dist.ProcessGroup):
        raise InputError(
            "group must be a torch.distributed process group that contains this process, a "
            f"DeviceMesh or None, got {group!r}"
        )
    return group
