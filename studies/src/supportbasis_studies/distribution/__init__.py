"""The paper's figures on the entries of Q and K, for any model and any text.

``models``    where a model comes from
``texts``     what it is shown
``capture``   queries, keys and values of every layer, before and after rotary embedding
``stream``    distributions in a memory that does not grow with the text
``rows``      what is kept of them
``findings``, ``pictures``   what is made of the rows
``study``     the command
"""

from __future__ import annotations

from supportbasis.cli.loading import Access, check_installed

from .models import BUILT_IN, PRESETS
from .study import Wish, run_distribution

__all__ = ["BUILT_IN", "PRESETS", "Access", "Wish", "check_installed", "run_distribution"]
