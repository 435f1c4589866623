"""Attention over tokens that are sliced among devices: context parallelism on torch.distributed.

====================  ====================================================================
`context_parallel`    `attention` and `plan`: which heads move what
`token_layout`        which tokens a rank holds; `split_tokens`, `gather_tokens`
`state_exchange`      polynomials: sums of features move; `state_*`: its parts
`related_sums`        sums over the chunks before or after one; tokens that all ranks need
`head_exchange`       heads for tokens: any method, and planning
`ring`                slices of keys go round: exact heads, where they are fewer than ranks
`agreement`           whether all ranks make the same call
`ranks`               the exchange that the others are made of; `traffic` counts its bytes
====================  ====================================================================
"""

from .context_parallel import attention, plan
from .ranks import Traffic, traffic
from .token_layout import gather_tokens, split_tokens

__all__ = ["Traffic", "attention", "gather_tokens", "plan", "split_tokens", "traffic"]
