"""Definitions of the paper that methods are made of.

================  ========================================================================
`split`           large and small tokens at a threshold, and their supports
`buckets`         tokens in buckets of geometrically growing size
`sub_gaussian`    variance proxies of entries, and the thresholds they imply
================  ========================================================================
"""
