"""Plans: the settings of each head.

==============  ==========================================================================
`heads`         a class of settings for each kind of head, and its components
`supports`      which rows and keys a component covers
`plan`          `Plan`: the heads of a call; `ModelPlan`: the plans of a model
`files`         plans as JSON, read by the annotations of their dataclasses
`drawing`       pictures: the components of a head, the heads of a model
`cost`          multiply-adds of a plan, and its predicted time
`calibration`   seconds of each kind of work, measured or from a table
==============  ==========================================================================
"""

from __future__ import annotations

from .heads import (
    BucketHead,
    BucketPair,
    ExactHead,
    FittedHead,
    HeadPlan,
    ListHead,
    PolynomialHead,
    PowerHead,
    ScoreRange,
    ThresholdHead,
)
from .plan import LayerPlan, ModelPlan, Plan

__all__ = ["BucketHead", "BucketPair", "ExactHead", "FittedHead", "HeadPlan", "LayerPlan",
           "ListHead", "ModelPlan", "Plan", "PolynomialHead", "PowerHead", "ScoreRange",
           "ThresholdHead"]  # fmt: skip
