"""The video study: clips of a small diffusion transformer with exact and approximate attention.

===========  ======================================================================
`clips`      moving textured shapes
`denoiser`   the model, its steps and its weights
`train`      the script that trains it
`baselines`  sparse attention at equal time
`quality`    distances of clips
`timing`     time of attention within the model
`measure`    clips by each method
`rows`       what is measured
`findings`   tables and statements
`pictures`   frames side by side
`study`      the command
===========  ======================================================================
"""

from __future__ import annotations

from .denoiser import WEIGHTS
from .measure import Extent
from .study import FULL, QUICK, run_video, video_extent

__all__ = ["FULL", "QUICK", "WEIGHTS", "Extent", "run_video", "video_extent"]
