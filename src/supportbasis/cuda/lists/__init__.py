"""Lists of exact and tilted keys."""
