"""The paper's attention loss and its gradient (appendix E) by the closed form.

==================  ======================================================================
`loss`              `attention_loss_gradient`; `loss_inputs`, `loss_result`: in and out
`factors`           attention weights of groups of rows: exact, and of low rank
`closed_form`       the gradient from these weights
`closed_attention`  attention with this backward pass, for layers of several heads
`dense_loss`        the same with dense matrices in float64, for tests
==================  ======================================================================
"""

from .closed_attention import closed_form_attention
from .loss import attention_loss_gradient
from .loss_result import AttentionLossGradient, GradientError, LowRankPart

__all__ = [
    "AttentionLossGradient",
    "GradientError",
    "LowRankPart",
    "attention_loss_gradient",
    "closed_form_attention",
]
