"""Attention inside the models that people run.

================  ===============================================================================
`transformers`    a name for ``attn_implementation=``, with its masks
`sdpa`            models that call ``torch.nn.functional.scaled_dot_product_attention``
`torch_flash`     a flash attention of PyTorch's registry
`diffusers`       a backend for ``model.set_attention_backend``
`tabpfn`          a backend that TabPFN prefers for long attention
`replacing`       one model, its attention answered by a function, counted and restored
`calls`           one call of attention in a model, and exact answers to it
`answers`         answers by a method or by plans
`sliced`          the same over tokens that are sliced among ranks
`parts`           queries that continue a cache: earlier keys and own keys, joined by lse
================  ===============================================================================

No host is imported before it is used.
"""

from __future__ import annotations

from . import diffusers, sdpa, tabpfn, torch_flash, transformers

__all__ = ["diffusers", "sdpa", "tabpfn", "torch_flash", "transformers"]
