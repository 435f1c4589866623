"""The second evaluator: the components of all heads at once, through kernels of a CUDA device.

=============  ==============================================================================
`dispatch`     which heads run through which kernels, forward and backward
`threshold`    polynomials and single thresholds (a head without large tokens is a polynomial)
`exact`        exact heads; `fused`: by PyTorch's own kernels, with lse
`lists`        lists of exact and tilted keys
`fitted`       fitted polynomials, by PyTorch's products: `fitted_sums`, of causal heads
               `fitted_chunks`; their gradients are `fitted_backward`
`framed`       heads in their balancing transforms, for these
`run`          calls that do not synchronise with the host: CUDA graph capture (`replay`) with a
               preallocated capacity (`room`)
`range_check`  scores beyond the range of a plan, reported (`report`) at the next call
`noise`        rounding and failed rows, for certificates
=============  ==============================================================================

`dispatch` is the only module that others import. Those with kernels are imported by it when a call
needs them, and Triton with them.
"""
