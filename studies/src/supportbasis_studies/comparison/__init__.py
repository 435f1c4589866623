"""``supportbasis demo`` and ``supportbasis bench``: the methods against PyTorch's attention.

``settings``   inputs: generated, or the user's tensors
``measure``    times in turns, errors against float64
``cases``      training and kernel densities
``tables``     lines of measurements
``demo``, ``bench``   the commands
"""

from __future__ import annotations

from .bench import FULL, QUICK, run_bench
from .demo import run_demo
from .settings import GENERATED, Setting, load_qkv

__all__ = ["FULL", "GENERATED", "QUICK", "Setting", "load_qkv", "run_bench", "run_demo"]
