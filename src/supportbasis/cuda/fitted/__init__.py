"""Fitted polynomials."""
