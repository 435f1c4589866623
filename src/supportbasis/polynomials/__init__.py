"""Polynomials in place of exp, and the features that make them linear.

==============  ==========================================================================
`certified`     Taylor, Chebyshev and minimax polynomials of exp with a proved error
`fitting`       polynomials fitted to the scores of a head
`balancing`     the transform of queries and keys that a fit is made in
`features`      phi with <phi(q), phi(k)> = p(<q, k>), in blocks of rows
`monomials`     which products of coordinates these are
`powers`        even powers of polynomials, for sketches
==============  ==========================================================================
"""
