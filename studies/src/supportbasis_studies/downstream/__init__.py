"""The paper's table on downstream tasks: approximate attention in every layer of a model.

``language``, ``world``, ``items``, ``documents``   the generated language and its five tasks
``models``, ``train``        the two models of the package, and how they were trained
``emulation``, ``methods``   what it is replaced by
``answers``, ``sampler``, ``reading``, ``measure``   what a model then answers and reads
``rows``, ``findings``, ``pictures``   what is made of it
``harness``, ``diffusion``   a user's own model, through lm-eval
``benchmarks``, ``protocol``, ``protocol_study``   the authors' protocol, on local files
``stories``                  stories260K
``study``                    the command
"""

from __future__ import annotations

from .harness import BENCHMARKS, Wish, chosen_tasks
from .protocol import METHODS, Chat, OwnChat, UserChat, chosen_methods, only
from .protocol_study import Extent as ProtocolExtent
from .protocol_study import run_protocol
from .stories import stories_folder
from .study import FULL, QUICK, own_subject, run_benchmarks, run_downstream

__all__ = [
    "BENCHMARKS",
    "FULL",
    "METHODS",
    "QUICK",
    "Chat",
    "OwnChat",
    "ProtocolExtent",
    "UserChat",
    "Wish",
    "chosen_methods",
    "chosen_tasks",
    "only",
    "own_subject",
    "run_benchmarks",
    "run_downstream",
    "run_protocol",
    "stories_folder",
]
