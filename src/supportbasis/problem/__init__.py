"""What is asked: a validated call, the problem of each head, and what is returned.

==============  ==========================================================================
`validation`    arguments of public functions become a `Problem`, or an error that names one
`problem`       `Problem`, and `Head`: queries, keys and values of one (batch, head) pair
`result`        `Outcome` of the engine, `Result` of a call
`checks`        what is refused: entries that are not finite, tensors of other kinds
`caching`       typed caches that a module keeps for heads and plans
`rounding`      unit roundoffs, and the dtype in which sums are made
`tracing`       which transform of PyTorch watches a call (compile, functorch)
==============  ==========================================================================
"""
