"""Runs a plan on a problem: forward and backward.

==============  ==========================================================================
`run`           the entry: SDPA, an operator, or the engine, whichever a call needs
`call_checks`   checks around a call: plan, entries, scores, output
`dispatch`      which heads run through which CUDA kernels, and which through `execute`
`execute`       all heads, one after the other: add the sums of components, divide once;
                the same for gradients
`autograd`      the call as an operator of PyTorch: autograd, compile, functorch
`sdpa`          exact heads by `torch.nn.functional.scaled_dot_product_attention`
`ranges`        whether scores stay in the range that a plan was made for
`jensen`        lower bounds of row sums, by which failed rows are found
==============  ==========================================================================
"""
