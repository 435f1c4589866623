"""Studies of support-basis attention: the paper's experiments, trained heads, benchmarks.

They are commands of ``supportbasis``, registered as entry points: ``supportbasis demo``,
``supportbasis bench`` and ``supportbasis reproduce``.
"""
