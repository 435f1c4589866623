"""Studies of support-basis attention: the paper's experiments, trained heads, GPU benchmarks.

They are commands of ``supportbasis``, registered as entry points: ``supportbasis reproduce``,
``supportbasis bench frontier`` and ``supportbasis bench --device cuda``.
"""
