"""Errors of an output: measured, estimated and proved.

==============  ==========================================================================
`certificate`   measured errors with their limits, and proved bounds, of a call
`bounds`        proved bounds from the components of a head
`sampling`      rows on which errors are measured, and their probabilities
`density`       errors of density estimates
`scores`        a sample of a head's scores, for errors of polynomials
`fitted_rows`   errors of polynomials on sampled rows, without running a plan
==============  ==========================================================================
"""
