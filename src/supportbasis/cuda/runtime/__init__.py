"""What all kinds of heads share on a device.

==================  ======================================================================
`language`          Triton, where it is installed
`capacity`          preallocated capacity, which grows with the counts that calls report
`reporting`         asynchronous copies of a few numbers to the host
`replay`            CUDA graph capture and replay
`range_check`       whether scores left the range of a plan, reported at the next call
`lengths`           norms and large entries of tokens
`noise`             failed rows and rounding errors, for certificates
==================  ======================================================================
"""
