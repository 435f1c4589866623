"""The paper's table on downstream tasks: approximate attention in every layer of a model.

``language``, ``world``, ``items``, ``documents``   the generated language and its five tasks
``models``, ``train``        the two models of the package, and how they were trained
``emulation``, ``methods``   what it is replaced by
``answers``, ``sampler``, ``reading``, ``measure``   what a model then answers and reads
``rows``, ``findings``, ``pictures``   what is made of it
``harness``, ``diffusion``   a user's own model, through lm-eval
``stories``                  stories260K
``study``                    the command
"""

from __future__ import annotations

from .harness import BENCHMARKS, Wish, chosen_tasks
from .stories import stories_folder
from .study import FULL, QUICK, run_benchmarks, run_downstream

__all__ = [
    "BENCHMARKS",
    "FULL",
    "QUICK",
    "Wish",
    "chosen_tasks",
    "run_benchmarks",
    "run_downstream",
    "stories_folder",
]
