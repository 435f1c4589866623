"""Several heads in their frames at once: one product for all of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from ..frame import Frame
from ..plans import Plan
from ..problem import Head, Problem
from ..tree import leading


class Inside(NamedTuple):
    """Heads in their frames, [heads, tokens, ...]."""

    query: Tensor
    key: Tensor
    value: Tensor  # in the input dtype
    log_weight: Tensor
    shift: Tensor  # what the log-sums of the rows lack in the frame
    spectrum: Tensor  # [heads, d]
    axes: int  # leading coordinates of the head that has most of them
    metric: Tensor  # [heads, 1, axes]
    masked: bool  # whether some keys may be hidden

    @staticmethod
    def of(problem: Problem, plan: Plan) -> Inside:
        frames = []
        for head in plan.heads:
            assert head.frame is not None
            frames.append(head.frame)
        stack = _stack(tuple(frames), problem.scale, problem.query.device)
        query = problem.query.flatten(0, 1).float()
        key = problem.key.repeat_interleave(problem.group, 1) if problem.group > 1 else problem.key
        value = problem.value
        value = value.repeat_interleave(problem.group, 1) if problem.group > 1 else value
        key = key.flatten(0, 1).float()
        weight = torch.baddbmm(stack.weight_offset, key, stack.weight_map).squeeze(2)
        if problem.key_log_weight is not None:
            weight = weight + problem.key_log_weight.flatten(0, 1).float()
        return Inside(
            torch.baddbmm(stack.query_offset, query, stack.query_map),
            torch.baddbmm(stack.key_offset, key, stack.key_map),
            value.flatten(0, 1),
            weight,
            (query @ stack.shift_map).squeeze(2),
            stack.spectrum,
            stack.axes,
            stack.metric,
            problem.key_log_weight is not None,
        )

    def one(self, head: int) -> Inside:
        parts = (x[head : head + 1] if isinstance(x, Tensor) else x for x in self)
        return Inside(*parts)  # type: ignore[arg-type]

    def flat(self) -> Head:
        """All heads as one, for what looks at tokens by their index."""
        query, key, value, weight = (x.flatten(0, 1) for x in self[:4])
        return Head(query, key, value, weight, None, 1.0, False, True)


class Stack(NamedTuple):
    """Frames of several heads on the device: x = q A + a, log-weights = k b + c."""

    query_map: Tensor
    query_offset: Tensor
    key_map: Tensor
    key_offset: Tensor
    weight_map: Tensor
    weight_offset: Tensor
    shift_map: Tensor
    spectrum: Tensor
    axes: int
    metric: Tensor


@lru_cache(maxsize=16)
def _stack(frames: Sequence[Frame], scale: float, device: torch.device) -> Stack:
    root = math.sqrt(scale)

    def stacked(parts: Sequence[Tensor]) -> Tensor:
        return torch.stack([part.cpu() for part in parts]).float().to(device)

    spectra = [frame.spectrum.cpu() for frame in frames]
    counts = [leading(spectrum) for spectrum in spectra]
    metric = []
    for spectrum, count in zip(spectra, counts, strict=True):
        size = spectrum.clamp(min=0).sqrt()[: max(counts)].clone()
        size[count:] = 0.0
        metric.append(size.unsqueeze(0))
    return Stack(
        stacked([frame.query_map * root for frame in frames]),
        stacked([-(frame.query_centre @ frame.query_map).unsqueeze(0) * root for frame in frames]),
        stacked([frame.key_map * root for frame in frames]),
        stacked([-(frame.key_centre @ frame.key_map).unsqueeze(0) * root for frame in frames]),
        stacked([frame.query_centre.unsqueeze(1) * scale for frame in frames]),
        stacked([-(frame.key_centre @ frame.query_centre).view(1, 1) * scale for frame in frames]),
        stacked([frame.key_centre.unsqueeze(1) * scale for frame in frames]),
        stacked(spectra),
        max(counts),
        stacked(metric),
    )
