"""How wrong an answer may be.

==============  ==========================================================================
`certificate`   measured errors with their limits, and proved bounds, of a call
`bounds`        proved bounds from what is known of a head's components
`sampling`      rows on which errors are measured; `inclusion`: how likely each is drawn
`density`       errors of density estimates
`scores`        estimated distribution of a head's scores
`fitted_rows`   errors of a fitted polynomial on sampled rows
`reference`     dense float64 references of every component, for tests
==============  ==========================================================================
"""
