"""Definitions of the paper that methods are made of: the split at a threshold, and buckets."""
