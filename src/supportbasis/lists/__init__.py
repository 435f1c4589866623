"""Lists of exact and tilted keys, in PyTorch operations.

==================  ======================================================================
`sorting`           permutations that sort tokens into leaves of similar tokens
`tables`            settings, sorted keys, cells of queries, tilted keys, importance
`list_sum`          the component: attention of all rows over their lists
`list_gradients`    its gradient
==================  ======================================================================
"""
