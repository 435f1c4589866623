"""From a plan and a problem to an outcome.

==============  ==========================================================================
`basis`         a head's plan becomes components that cover its score matrix
`execute`       all heads, one after the other: add the sums of components, divide once
`backward`      the same for gradients
`dispatch`      which heads run through which CUDA kernels, and which through `execute`
`autograd`      the call as an operator of PyTorch: autograd, compile, functorch
`sdpa`          exact heads by `torch.nn.functional.scaled_dot_product_attention`
`ranges`        whether scores stay in the range that a plan was made for
`jensen`        lower bounds of row sums, by which failed rows are found
==============  ==========================================================================
"""
