"""Time of attention within a model, and of whole calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .denoiser import Attend


class Clock:
    """Adds up the time of calls of attention, those of dense steps apart."""

    def __init__(self, device: torch.device) -> None:
        self.is_cuda = device.type == "cuda"
        self.is_dense = False
        self._marks: list[tuple[bool, Any, Any]] = []
        self._start: Any = None

    def now(self) -> Any:
        if not self.is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self, *_: Any) -> None:
        self._start = self.now()

    def stop(self, *_: Any) -> None:
        self._marks.append((self.is_dense, self._start, self.now()))

    def seconds(self) -> tuple[float, float]:
        """Of all calls, and of those that were not dense."""
        if self.is_cuda:
            torch.cuda.synchronize()
        taken = [
            (dense, first.elapsed_time(last) / 1e3 if self.is_cuda else last - first)
            for dense, first, last in self._marks
        ]
        return sum(x for _, x in taken), sum(x for dense, x in taken if not dense)


@contextmanager
def clocked(model: nn.Module, clock: Clock) -> Iterator[None]:
    """Within it, the attention of a model is timed."""
    modules = [module for module in model.modules() if isinstance(module, Attend)]
    hooks = [module.register_forward_pre_hook(clock.start) for module in modules]
    hooks += [module.register_forward_hook(clock.stop) for module in modules]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def timed(run: Callable[[], Any], device: torch.device) -> tuple[Any, float]:
    """What a function returns, and its seconds."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    found = run()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return found, time.perf_counter() - start
