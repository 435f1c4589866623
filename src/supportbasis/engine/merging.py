"""Outputs over disjoint sets of keys, joined by their log-sum-exps: a ring of devices, and queries
that continue a cache."""

from __future__ import annotations

import torch
from torch import Tensor


def merged(
    first: Tensor, first_lse: Tensor, second: Tensor, second_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [..., n, dv] and lse [..., n] over the keys of both, in the dtype of the lse."""
    share = torch.sigmoid(first_lse - second_lse).nan_to_num(0.0).unsqueeze(-1)  # -inf: no keys
    output = torch.lerp(second.to(share.dtype), first.to(share.dtype), share)
    return output, torch.logaddexp(first_lse, second_lse)
