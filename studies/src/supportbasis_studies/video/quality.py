"""How far clips are from those that exact attention gives: [clips, 3, frames, height, width]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

EQUAL = 100.0  # decibels of clips that are the same to rounding
WINDOW, SIGMA = 11, 1.5  # of SSIM
FILTERS, WIDTH, SCALES = 32, 5, 3  # of the distance of features


def pixels(clips: Tensor) -> Tensor:
    """Entries between 0 and 1, as they are shown: float32 [clips, frames, 3, height, width]."""
    return (0.5 + 0.5 * clips.float()).clamp(0, 1).transpose(1, 2)


def psnr(one: Tensor, two: Tensor) -> Tensor:
    """Peak signal-to-noise ratio of each clip in decibels, at most 100.

    >>> round(float(psnr(torch.zeros(1, 3, 1, 8, 8), torch.full((1, 3, 1, 8, 8), 0.2))[0]), 3)
    20.0
    """
    error = (pixels(one) - pixels(two)).double().square().flatten(1).mean(1)
    return (-10 * error.clamp(min=1e-10).log10()).float()


def ssim(one: Tensor, two: Tensor) -> Tensor:
    """Structural similarity (Wang et al., 2004) of each clip: Gaussian windows of 11 pixels, mean
    over pixels, colours and frames."""
    x, y = (pixels(clips).flatten(0, 2).unsqueeze(1) for clips in (one, two))
    width = min(WINDOW, x.shape[-1] - (1 - x.shape[-1] % 2), x.shape[-2] - (1 - x.shape[-2] % 2))
    at = torch.arange(width, device=x.device) - width // 2
    window = torch.exp(-at.square() / (2 * SIGMA**2))
    window = (window / window.sum()).outer(window / window.sum())[None, None]

    def mean(z: Tensor) -> Tensor:
        return F.conv2d(z, window)

    mx, my = mean(x), mean(y)
    vx, vy, both = mean(x * x) - mx * mx, mean(y * y) - my * my, mean(x * y) - mx * my
    c1, c2 = 0.01**2, 0.03**2
    found = (2 * mx * my + c1) * (2 * both + c2) / ((mx * mx + my * my + c1) * (vx + vy + c2))
    return found.view(len(one), -1).mean(1)


def feature_distance(one: Tensor, two: Tensor, seed: int = 0) -> Tensor:
    """Mean squared difference of normalised features of each clip, at three scales.

    The form of LPIPS (Zhang et al., 2018) with fixed random filters of 5 x 5 pixels in place of a
    trained network, so its values are not those of LPIPS.
    """
    generator = torch.Generator().manual_seed(seed)
    filters = torch.randn(FILTERS, 3, WIDTH, WIDTH, generator=generator).to(one.device)
    x, y = (pixels(clips).flatten(0, 1) - 0.5 for clips in (one, two))
    total = torch.zeros(len(one), device=one.device)
    for _ in range(SCALES):
        fx, fy = (F.normalize(F.relu(F.conv2d(z, filters, padding=2)), dim=1) for z in (x, y))
        total += (fx - fy).square().sum(1).view(len(one), -1).mean(1)
        x, y = (F.avg_pool2d(z, 2) for z in (x, y))
    return total / SCALES
