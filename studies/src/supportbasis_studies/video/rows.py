"""What the study measures: a row for each clip and method, and one for each layer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class VideoRow:
    """One clip by one method, beside exact attention. Seconds are those of all clips."""

    method: str
    change: float | None  # allowed by the plan, or by the plan whose time a baseline has
    clip: int
    psnr: float
    ssim: float
    distance: float  # of features
    cost: float  # of attention relative to exact, in steps that are not dense
    attention_s: float
    planned_s: float  # of attention, in steps that are not dense
    sampling_s: float
    exact_attention_s: float
    exact_planned_s: float
    exact_sampling_s: float
    note: str


@dataclass(frozen=True)
class HeadRow:
    """The heads of a layer: relative Frobenius error of a method."""

    layer: str
    method: str
    cost: float
    median_error: float
    largest_error: float
