"""Models that bring code of their own, written before transformers 5.

Such code leaves out what transformers 5 expects of a class: the map of tied weights that
``post_init`` makes, arguments of ``tie_weights``, and ``use_cache`` in the configuration. LLaDA is
an example. What is missing is added to the class and the configuration before weights are read.
"""

from __future__ import annotations

import inspect
from functools import wraps
from typing import Any


def mend(name: str, config: Any, auto_class: str, options: dict[str, bool]) -> None:
    """Complete the configuration, and the class that ``auto_class`` will load for it, where code
    that comes with a model may run."""
    reference = (getattr(config, "auto_map", None) or {}).get(auto_class)
    if reference is None or not options["trust_remote_code"]:
        return
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    brought: Any = get_class_from_dynamic_module(
        reference, name, local_files_only=options["local_files_only"]
    )
    if not hasattr(brought, "all_tied_weights_keys"):
        brought.all_tied_weights_keys = {}  # an instance whose code calls post_init has its own
    if "missing_keys" not in inspect.signature(brought.tie_weights).parameters:
        brought.tie_weights = _without_arguments(brought.tie_weights)
    if not hasattr(config, "use_cache"):
        config.use_cache = False


def _without_arguments(tie_weights: Any) -> Any:
    @wraps(tie_weights)
    def tie(model: Any, missing_keys: Any = None, recompute_mapping: bool = True) -> None:
        tie_weights(model)

    return tie
