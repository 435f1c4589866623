"""Work of fixed shapes, recorded once and replayed: hundreds of launches at the price of one.

A function that neither waits for the device nor decides by entries is recorded as a CUDA graph and
replayed whenever it is called with tensors of the same shapes.
What a replay returns is a copy. The recordings of a stream share memory for what they are given
and for what they need in between.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock
from weakref import WeakValueDictionary

import torch
from torch import Tensor

KEPT = 16  # recordings; one that had to make room is not made again

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class Recording:
    """A graph, the tensors that it reads and what it leaves."""

    graph: torch.cuda.CUDAGraph
    place: Hashable  # device and stream
    given: tuple[Tensor, ...]
    result: tuple[Tensor, ...]

    @staticmethod
    def of(function: Function, given: tuple[Tensor, ...], place: Hashable) -> Recording:
        given = tuple(_held(place, number, x) for number, x in enumerate(given))
        function(*given)  # whatever is compiled for these tensors is compiled before
        torch.cuda.synchronize(given[0].device)
        others = (other.graph for other in _recordings.values() if other.place == place)
        pool = next((graph.pool() for graph in others), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = function(*given)
        return Recording(graph, place, given, result)

    def replay(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for mine, theirs in zip(self.given, given, strict=True):
            mine.copy_(theirs)
        self.graph.replay()
        return tuple(x.clone() for x in self.result)


_recordings: OrderedDict[Hashable, Recording] = OrderedDict()
_plain: set[Hashable] = set()  # calls that run as they are: there was no room for them
_inputs: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()  # by place and shape
_lock = Lock()


def _held(place: Hashable, number: int, x: Tensor) -> Tensor:
    """The tensor that is filled with an argument before each replay."""
    key = (place, number, x.shape, x.dtype)
    held = _inputs.get(key)
    if held is None:
        held = _inputs[key] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return held.copy_(x)


@torch.no_grad()
def replayed(key: Hashable, function: Function, *given: Tensor) -> tuple[Tensor, ...]:
    """``function(*given)``; calls with the same key and shapes must do the same work."""
    if not given[0].is_cuda or torch.cuda.is_current_stream_capturing():
        return function(*given)
    stream = torch.cuda.current_stream(given[0].device)
    place = (stream.device, stream.cuda_stream)
    key = (key, place, tuple((x.shape, x.dtype) for x in given))
    with _lock:
        if key not in _recordings and key not in _plain:
            _record(key, function, given, place)
        if key in _recordings:
            _recordings.move_to_end(key)
            return _recordings[key].replay(given)
    return function(*given)


def _record(key: Hashable, function: Function, given: tuple[Tensor, ...], place: Hashable) -> None:
    """Record a call and make room for it, unless the device has no memory for that."""
    try:
        _recordings[key] = Recording.of(function, given, place)
    except torch.OutOfMemoryError:
        _plain.add(key)
    if len(_recordings) > KEPT:
        oldest, _ = _recordings.popitem(last=False)
        _plain.add(oldest)
