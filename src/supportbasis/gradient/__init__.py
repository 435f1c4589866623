"""The paper's attention loss and its gradient (appendix E) by the closed form."""

from .loss import attention_loss_gradient
from .loss_result import AttentionLossGradient, GradientError, LowRankPart

__all__ = ["AttentionLossGradient", "GradientError", "LowRankPart", "attention_loss_gradient"]
