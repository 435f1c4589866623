"""A few numbers on their way from a device to the host, which never waits for them."""

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
        """Copy a tensor to the host; there must be none on its way."""
        if not x.is_cuda:
            self._copy, self.pending = x, True
            return
        if self._copy is None or self._copy.shape != x.shape or self._copy.dtype != x.dtype:
            self._copy = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
        self._event = self._event or torch.cuda.Event()
        self._copy.copy_(x, non_blocking=True)
        self._event.record()
        self.pending = True

    def read(self) -> Tensor | None:
        """The tensor, once it has arrived; None where nothing new has, and while a CUDA graph is
        captured, when no event can be asked."""
        if not self.pending or capturing() or not (self._event is None or self._event.query()):
            return None
        self.pending = False
        return self._copy
