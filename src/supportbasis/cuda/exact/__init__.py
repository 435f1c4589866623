"""Exact heads, and exact rectangles of other heads.

==================  ======================================================================
`exact_heads`       forward and gradients of exact heads
`fused`             PyTorch's fused kernels, with the log-sum-exp
`rectangle`         some rows over some keys; `rectangle_kernels`: its kernels
==================  ======================================================================
"""
