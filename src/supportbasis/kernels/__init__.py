"""Triton kernels for NVIDIA GPUs.

Private. Nothing here is imported by the rest of the package until a kernel is asked for, and the
modules can be read and imported where Triton is missing.

=================  =========================================================================
`polynomial`       sums of a polynomial of degree 1 or 2 of the scores, causal or not, and
                   their gradient: which kernels run, in which order, with which tiles
`moments`          sums over keys that are small: of values, of keys, of products of two
`folded`           the degree-2 state over keys and its read-out over queries
`contract`         the gradient of the read-out with respect to its tokens
`blocklist`        attention of blocks of queries over lists of granules of keys; its kernels
                   are in `blocklist_kernels`
`ordering`         trees: the order of their tokens; kernels in `ordering_kernels`
`summary`          nodes of trees; kernels in `summary_kernels`
`selection`        which nodes and leaves a block lists, and its coarse keys; kernels in
                   `selection_kernels`
`tiles`            which tile shapes were the fastest
`language`         Triton, where it is installed
=================  =========================================================================
"""
