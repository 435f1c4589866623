"""Lists of exact and tilted keys.

==================  ======================================================================
`list_heads`        forward and gradients of list heads
`list_attention`    tilt, select, attend; `list_kernels`: their kernels
`list_backward`     gradients; `list_backward_kernels`: their kernels
`window_sorting`    permutations that sort tokens; `window_sorting_kernels`: kernels
==================  ======================================================================
"""
