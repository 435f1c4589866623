"""Fitted polynomials, by PyTorch operations on all heads at once; no causal heads.

=================  =======================================================================
`fitted_heads`     forward and gradients of a call
`fitted_sums`      feature sums of one head, and their gradients
`transformed`      all heads in their balancing transforms; `transforming_kernels`: its kernel
=================  =======================================================================
"""
