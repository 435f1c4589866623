"""Sums of polynomials of degree 1 and 2, and their gradients."""
