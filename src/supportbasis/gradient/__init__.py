"""The paper's attention loss and its gradient (appendix E) by the closed form.

================  ========================================================================
`loss`            `attention_loss_gradient`; `loss_inputs`, `loss_result`: in and out
`weights`         attention weights of blocks of rows; `factors`: their low-rank parts
`closed_form`     the gradient from these weights
`dense_loss`      the same with dense matrices in float64, for tests
================  ========================================================================
"""

from .loss import attention_loss_gradient
from .loss_result import AttentionLossGradient, GradientError, LowRankPart

__all__ = ["AttentionLossGradient", "GradientError", "LowRankPart", "attention_loss_gradient"]
