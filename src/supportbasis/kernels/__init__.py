"""Triton kernels for NVIDIA GPUs.

Private. Nothing here is imported by the rest of the package until a kernel is asked for, and the
modules can be read and imported where Triton is missing.

=================  =========================================================================
`polynomial`       sums of a polynomial of degree 1 or 2 of the scores, causal or not, and
                   their gradient: which kernels run, in which order, with which tiles
`moments`          sums over keys that are small: of values, of keys, of products of two
`folded`           the degree-2 state over keys and its read-out over queries
`contract`         the gradient of the read-out with respect to its tokens
`rectangle`        exact attention of some rows over some keys; kernels in `rectangle_kernels`
`sorting`          tokens sorted into leaves of alike ones; kernels in `sorting_kernels`
`lists`            tilted keys, lists of open leaves, attention over both; kernels in
                   `lists_kernels`
`framing`          tokens in the balancing transform of their head; kernels in `framing_kernels`
`lengths`          norms of tokens, and which have a large entry; kernels in `lengths_kernels`
`tiles`            which tile shapes were the fastest
`language`         Triton, where it is installed
=================  =========================================================================
"""
