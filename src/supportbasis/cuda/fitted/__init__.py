"""Fitted polynomials, by PyTorch operations on all heads at once.

======================  ==================================================================
`fitted_heads`          forward of a call; `fitted_backward`: its gradients
`fitted_sums`           feature sums of one head; `fitted_chunks`: of one causal head
`transformed`           all heads in their balancing transforms; `transforming`: by a kernel
======================  ==================================================================
"""
