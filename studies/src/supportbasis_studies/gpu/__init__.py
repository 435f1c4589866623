"""``supportbasis bench --device cuda``: kernels against PyTorch's attention on one GPU.

``cases``, ``lists``   what is timed: one entry for each row of the table
``measure``   how: times by events, all of PyTorch's backends, errors, rates
``study``     measure what is missing, write, print
"""

from .study import run_gpu_bench

__all__ = ["run_gpu_bench"]
