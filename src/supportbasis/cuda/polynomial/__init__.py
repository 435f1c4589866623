"""Sums of polynomials of degree 1 and 2, and their gradients.

===================  =====================================================================
`threshold_heads`    forward and gradients of polynomial and threshold heads
`setting`            what the kernels of a call share, and their tile shapes
`sums`               feature sums, their read-out and its gradients
`moments`            kernels of degree 0 and 1; `folded`: of degree 2
`contract`           kernels of the gradients
===================  =====================================================================
"""
