"""Plans: what each head will do.

==============  ==========================================================================
`heads`         the settings of a head: a class for each kind
`supports`      which rows and keys a component covers
`plan`          `Plan`: the heads of a call
`files`         plans as JSON; `schema`: its fields, checked when it is read
`drawing`       a picture of the components of a head
`cost`          multiply-adds of a plan, and its predicted time on this machine
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
from .plan import Plan

__all__ = [
    "BucketHead",
    "BucketPair",
    "ExactHead",
    "FittedHead",
    "HeadPlan",
    "ListHead",
    "Plan",
    "PolynomialHead",
    "PowerHead",
    "ScoreRange",
    "ThresholdHead",
]
