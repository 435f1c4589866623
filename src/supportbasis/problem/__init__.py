"""A validated call: the problem of each head, and what a plan makes of it.

==============  ==========================================================================
`validation`    arguments of public functions become a `Problem`, or an error that names one
`problem`       `Problem`, and `Head`: queries, keys and values of one (batch, head) pair;
                `Outcome` of running a plan
`checks`        of entries, integers and seeds; whether a call is traced (compile, functorch)
`caching`       typed caches that modules keep for heads and plans
`rounding`      unit roundoffs, and the dtype in which sums are made
==============  ==========================================================================
"""
