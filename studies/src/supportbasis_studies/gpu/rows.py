"""What is kept of a measurement."""

from __future__ import annotations

from dataclasses import dataclass

from ..study import Row


@dataclass(frozen=True)
class GpuRow(Row):
    """One case. A backend that did not run has no time."""

    work: str
    method: str
    implementation: str
    heads: int
    n: int
    d: int
    causal: bool
    backward: bool
    graph: bool
    ms: float
    flash_ms: float | None
    cudnn_ms: float | None
    efficient_ms: float | None
    baseline: str  # the fastest of the three
    baseline_ms: float
    ratio: float
    rate: float | None  # of multiply-adds over that of a large matrix product
    matmul_tflops: float
    error: float  # relative, against float64 on sampled rows
    limit: float
    planning_s: float
    first_call_s: float  # compilation included
    triton: str
    note: str

    @property
    def counts(self) -> bool:
        """Whether the error is within its limit: otherwise the speed does not count."""
        return self.error <= self.limit
