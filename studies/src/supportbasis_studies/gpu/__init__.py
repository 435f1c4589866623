"""``supportbasis bench --device cuda``: kernels against PyTorch's attention on one GPU.

=============  ====================================================================
`cases`        what is timed: one entry for each row of the table
`measure`      how: times by events, all of PyTorch's backends, errors, rates
`rows`         what is kept of it in the CSV
`pictures`     time against length
`study`        measure what is missing, write, print
=============  ====================================================================
"""

from .study import run_gpu_bench

__all__ = ["run_gpu_bench"]
