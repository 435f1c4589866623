"""CUDA graph capture and replay of work of fixed shapes: hundreds of launches become one.

A function that neither synchronises with the host nor branches on entries is captured as a CUDA
graph and replayed whenever it is called with tensors of the same shapes. A replay returns copies.
The graphs of a stream share one memory pool and the tensors that hold their arguments.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from threading import Lock
from weakref import WeakValueDictionary

import torch
from torch import Tensor

MOST_GRAPHS, MOST_EVICTED = 32, 4096
PATIENCE = 64  # calls after which a graph that was evicted, or found no memory, is captured again

Function = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, eq=False)
class CapturedGraph:
    """A CUDA graph, the tensors that it reads and those that it writes."""

    graph: torch.cuda.CUDAGraph
    stream: Hashable  # device and stream
    memory: list[Tensor]  # of what is given
    given: tuple[Tensor, ...]
    result: tuple[Tensor, ...]

    @staticmethod
    def of(function: Function, given: tuple[Tensor, ...], stream: Hashable) -> CapturedGraph:
        memory, given = _held(stream, given)
        function(*given)  # kernels are compiled before the capture
        torch.cuda.synchronize(given[0].device)
        others = (other.graph for other in _graphs.values() if other.stream == stream)
        pool = next((graph.pool() for graph in others), None)
        graph = torch.cuda.CUDAGraph()
        side = _capture_stream(given[0].device)
        with torch.cuda.graph(graph, pool, side, capture_error_mode="thread_local"):
            result = function(*given)
        return CapturedGraph(graph, stream, memory, given, result)

    def replay(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        for mine, theirs in zip(self.given, given, strict=True):
            mine.copy_(theirs)
        self.graph.replay()
        return tuple(x.clone() for x in self.result)


@lru_cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """PyTorch's own belongs to the device that was the first to need one."""
    return torch.cuda.Stream(device)


_graphs: OrderedDict[Hashable, CapturedGraph] = OrderedDict()
# calls that ran without a graph since it was evicted, by the hash of a key, which may hold tensors
_uncaptured: Counter[int] = Counter()
_inputs: WeakValueDictionary[Hashable, Tensor] = WeakValueDictionary()  # by stream and shape
_lock = Lock()


def _held(stream: Hashable, given: tuple[Tensor, ...]) -> tuple[list[Tensor], tuple[Tensor, ...]]:
    """Memory that is filled with the arguments before each replay, and the arguments in it: those
    of a dtype lie side by side, each from a multiple of 64 entries on."""
    parts, memory = {}, []
    for dtype in dict.fromkeys(x.dtype for x in given):
        sizes = [-(-x.numel() // 64) * 64 for x in given if x.dtype == dtype]
        key = (stream, dtype, *sizes)
        whole = _inputs.get(key)
        if whole is None:
            with torch.inference_mode(False):  # replays outside of it write here, too
                whole = torch.empty(sum(sizes), dtype=dtype, device=given[0].device)
            _inputs[key] = whole
        memory.append(whole)
        parts[dtype] = iter(whole.split(sizes))
    return memory, tuple(next(parts[x.dtype])[: x.numel()].view(x.shape).copy_(x) for x in given)


def joined(first: Tensor, second: Tensor) -> Tensor:
    """Two contiguous tensors one after the other; not copied where they lie so in memory."""
    end = first.storage_offset() + first.numel()
    together = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    if together and second.storage_offset() == end:
        return first.as_strided((first.numel() + second.numel(),), (1,)).view(-1, *first.shape[1:])
    return torch.cat([first, second])


@torch.no_grad()
def replayed(key: Hashable, function: Function, *given: Tensor) -> tuple[Tensor, ...]:
    """``function(*given)`` by a graph; calls with the same key and shapes must do the same work."""
    if not given[0].is_cuda or torch.cuda.is_current_stream_capturing():
        return function(*given)
    current = torch.cuda.current_stream(given[0].device)
    stream = (current.device, current.cuda_stream)
    key = (key, stream, tuple((x.shape, x.dtype) for x in given))
    with _lock:
        if key not in _graphs and _uncaptured[hash(key)] in (0, PATIENCE):
            _uncaptured.pop(hash(key), None)
            with suppress(torch.OutOfMemoryError):
                _graphs[key] = CapturedGraph.of(function, given, stream)
            if len(_graphs) > MOST_GRAPHS:
                _uncaptured[hash(_graphs.popitem(last=False)[0])] = 1
            if len(_uncaptured) > MOST_EVICTED:  # of shapes that never came again
                _uncaptured.clear()
        if key in _graphs:
            _graphs.move_to_end(key)
            return _graphs[key].replay(given)
        _uncaptured[hash(key)] += 1
    return function(*given)
