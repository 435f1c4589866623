"""Exact heads, and exact rectangles of other heads."""
