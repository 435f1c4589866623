"""CUDA graph capture and replay of work of fixed shapes: hundreds of launches become one.

A function that neither synchronises with the host nor branches on entries is captured as a CUDA
graph and replayed whenever it is called with tensors of the same shapes. A replay returns copies.
The graphs of a stream share one memory pool and the tensors that hold their arguments.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from threading import Lock
from weakref import WeakValueDictionary

import torch
from torch import Tensor

MOST_GRAPHS = 16  # a graph that was evicted is not captured again

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class CapturedGraph:
    """A CUDA graph, the tensors that it reads and those that it writes."""

    graph: torch.cuda.CUDAGraph
    stream: Hashable  # device and stream
    given: tuple[Tensor, ...]
    result: tuple[Tensor, ...]

    @staticmethod
    def of(function: Function, given: tuple[Tensor, ...], stream: Hashable) -> CapturedGraph:
        given = tuple(_held(stream, number, x) for number, x in enumerate(given))
        function(*given)  # kernels are compiled before the capture
        torch.cuda.synchronize(given[0].device)
        others = (other.graph for other in _graphs.values() if other.stream == stream)
        pool = next((graph.pool() for graph in others), None)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
            result = function(*given)
        return CapturedGraph(graph, stream, given, result)

    def replay(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for mine, theirs in zip(self.given, given, strict=True):
            mine.copy_(theirs)
        self.graph.replay()
        return tuple(x.clone() for x in self.result)


_graphs: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
_uncaptured: set[Hashable] = set()  # calls that run without a graph: memory or _graphs was full
_inputs: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()  # by stream and shape
_lock = Lock()


def _held(stream: Hashable, number: int, x: Tensor) -> Tensor:
    """The tensor that is filled with an argument before each replay."""
    key = (stream, number, x.shape, x.dtype)
    held = _inputs.get(key)
    if held is None:
        held = _inputs[key] = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    return held.copy_(x)


@torch.no_grad()
def replayed(key: Hashable, function: Function, *given: Tensor) -> tuple[Tensor, ...]:
    """``function(*given)`` by a graph; calls with the same key and shapes must do the same work."""
    if not given[0].is_cuda or torch.cuda.is_current_stream_capturing():
        return function(*given)
    current = torch.cuda.current_stream(given[0].device)
    stream = (current.device, current.cuda_stream)
    key = (key, stream, tuple((x.shape, x.dtype) for x in given))
    with _lock:
        if key not in _graphs and key not in _uncaptured:
            _capture(key, function, given, stream)
        if key in _graphs:
            _graphs.move_to_end(key)
            return _graphs[key].replay(given)
    return function(*given)


def _capture(
    key: Hashable, function: Function, given: tuple[Tensor, ...], stream: Hashable
) -> None:
    """Capture a call, unless the device is out of memory, and evict the oldest graph if needed."""
    try:
        _graphs[key] = CapturedGraph.of(function, given, stream)
    except torch.OutOfMemoryError:
        _uncaptured.add(key)
    if len(_graphs) > MOST_GRAPHS:
        oldest, _ = _graphs.popitem(last=False)
        _uncaptured.add(oldest)
