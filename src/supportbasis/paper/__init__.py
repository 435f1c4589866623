"""Definitions of the paper that methods are made of.

================  ========================================================================
`buckets`         tokens in buckets of geometrically growing size
`sub_gaussian`    variance proxies of entries, and the thresholds they imply
================  ========================================================================
"""
