"""Errors of an output: measured, estimated and proved.

==============  ==========================================================================
`certificate`   measured errors with their limits, and proved bounds, of a call
`sampling`      rows on which errors are measured, and their probabilities
`estimates`     errors of a plan that has not run: expected, measured on rows, bounded
==============  ==========================================================================
"""
