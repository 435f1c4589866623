"""Lists of exact and tilted keys, in PyTorch operations.

==================  ======================================================================
`sorting`           tokens sorted into groups of alike ones
`tables`            settings, sorted keys, cells of queries, tilted keys, importance
`list_sum`          the component: attention of all rows over their lists
`list_gradients`    its gradient
==================  ======================================================================
"""
