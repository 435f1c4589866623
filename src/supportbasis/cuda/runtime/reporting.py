"""Asynchronous copies of a few numbers from a device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


def capturing() -> bool:
    """Whether the current stream is being captured into a CUDA graph."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


class Report:
    """The last tensor that was sent, in memory that is allocated once."""

    def __init__(self) -> None:
        self._copy: Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self.pending = False

    def send(self, x: Tensor) -> None:
        """Start a copy to the host; no other may be pending, and all have one shape and dtype."""
        self.pending = True
        if self._copy is None:
            with torch.inference_mode(False):  # of which later calls may be outside
                self._copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=x.is_cuda)
        self._copy.copy_(x, non_blocking=True)
        if x.is_cuda:
            self._event = self._event or torch.cuda.Event()
            self._event.record()

    def read(self) -> Tensor | None:
        """The tensor, once its copy is complete; else, and while a CUDA graph is captured (when
        events cannot be queried), None."""
        if not self.pending or capturing() or not (self._event is None or self._event.query()):
            return None
        self.pending = False
        return self._copy
