"""Runs a plan on a problem: forward and backward.

==============  ==========================================================================
`call_checks`   checks around a call: plan, entries, scores, output
`dispatch`      which heads run through which CUDA kernels, and which through `execute`
`execute`       all heads, one after the other: sums of components, one division; gradients
`autograd`      the entry: SDPA, the engine, or the engine as an operator of PyTorch
`sdpa`          exact heads by `torch.nn.functional.scaled_dot_product_attention`
`ranges`        whether scores stay in the range that a plan was made for
`jensen`        lower bounds of row sums, by which failed rows are found
==============  ==========================================================================
"""
