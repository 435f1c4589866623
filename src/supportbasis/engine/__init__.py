"""Runs a plan on a problem: forward and backward.

==============  ==========================================================================
`dispatch`      which heads run through which CUDA kernels, and which through `execute`
`execute`       all heads, one after the other: sums of components, one division; gradients;
                failed rows and overflow
`autograd`      the entry: SDPA, the engine, or the engine as an operator of PyTorch
`sdpa`          exact heads by PyTorch's own `scaled_dot_product_attention`
`ranges`        whether a plan suits a call, scores stay in the range it was made for, or overflow
`jensen`        lower bounds of row sums, by which failed rows are found
==============  ==========================================================================
"""
