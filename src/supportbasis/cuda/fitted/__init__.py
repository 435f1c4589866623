"""Polynomials fitted to transformed scores."""
