"""The second evaluator: the same components, all heads at once, on a CUDA device.

==============  ==========================================================================
`runtime`       preallocated capacity, CUDA graph replay, and what is reported at the next call
`exact`         exact heads by PyTorch's fused kernels, rectangles of exact pairs in others
`polynomial`    polynomials and single thresholds
`lists`         sorting, tilted keys, selection, attention over lists
`fitted`        fitted polynomials, by PyTorch operations
==============  ==========================================================================

A file ``*_heads`` is what `engine.dispatch` calls: forward and gradients of a kind of head. A file
``*_kernels`` holds Triton kernels, the file of the same name without the ending launches them.
No call with a plan synchronises with the host, except the first on tensors of a shape. Nothing here
is imported before a call needs it, and Triton with it; every module can be imported where Triton is
missing.
"""
