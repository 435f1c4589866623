"""The second evaluator: the components of all heads at once, through kernels of a CUDA device.

=============  ==============================================================================
`dispatch`     which heads run through which kernels, and the way there and back
`threshold`    polynomials and single thresholds (a head without large tokens is a polynomial)
`exact`        exact heads
`lists`        lists of exact and coarse keys; `causal`: those of causal heads; their gradients
               are `lists_backward`, `causal_backward` and, down the trees, `nodes_backward`
`granules`     lists as granules, and the attention over them
`fitted`       fitted polynomials, by PyTorch's products: `fitted_sums`, of causal heads
               `fitted_chunks`; their gradients are `fitted_backward`
`framed`       heads in their frames, for all of these
`run`          calls of them that wait for nothing: recorded (`replay`), with `room` to spare
=============  ==============================================================================

`dispatch` is the only module that others import. Those with kernels are imported by it when a call
needs them, and Triton with them.
"""
