"""The result of a call with ``return_result=True``."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from .certificate import Certificate
from .plans import Plan


@dataclass(frozen=True, eq=False)
class Result:
    """Output, and everything that is known about it.

    ``output`` is what the plain call returns, ``lse`` the natural log of each row's sum of
    weights. A kernel sum is ``output * exp(log_scale)``: a number for each (batch, head) in the
    caller's leading dims, 0 for attention. ``implementation`` says what ran: "sdpa" (PyTorch's own
    attention, for exact plans), "eager", "triton", or how many heads each of the two took.
    """

    output: Tensor
    lse: Tensor
    log_scale: Tensor
    plan: Plan
    certificate: Certificate
    implementation: str = "eager"

    def __repr__(self) -> str:
        shape = list(self.output.shape)
        return (
            f"Result: output {shape}, computed by {self.implementation}\n{self.certificate}\n"
            f"{self.plan}"
        )
