"""The second evaluator: the components of all heads at once, through kernels of a CUDA device.

=============  ==============================================================================
`dispatch`     which heads run through which kernels, and the way there and back
`threshold`    polynomials and single thresholds (a head without large tokens is a polynomial)
`exact`        exact heads
=============  ==============================================================================

`dispatch` is the only module that others import. Those with kernels are imported by it when a call
needs them, and Triton with them.
"""
