"""The paper's attention loss and its gradient (appendix E) by the closed form.

==================  ======================================================================
`loss`              `attention_loss_gradient`, and what it returns
`closed_form`       attention weights of groups of rows, exact and of low rank; the gradient
`closed_attention`  attention with this backward pass, for layers of several heads
==================  ======================================================================
"""

from .closed_attention import closed_form_attention
from .loss import AttentionLossGradient, GradientError, LowRankPart, attention_loss_gradient

__all__ = [
    "AttentionLossGradient", "GradientError", "LowRankPart", "attention_loss_gradient",
    "closed_form_attention",
]  # fmt: skip
