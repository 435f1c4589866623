"""Polynomials that approximate exp, and the features that make them linear.

==============  ==========================================================================
`certified`     polynomials of exp on an interval with a proved error
`coefficients`  their coefficients: Taylor, Chebyshev, minimax; `proofs`: their error bounds
`fitting`       polynomials fitted to the scores of a head
`balancing`     the transform of queries and keys before a polynomial is fitted
`features`      phi with <phi(q), phi(k)> = p(<q, k>), in blocks of rows; their gradients
`powers`        even powers of polynomials, for sketches
==============  ==========================================================================
"""
