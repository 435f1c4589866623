"""Inputs of the comparisons: three generated settings, or the user's own tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from supportbasis import InputError

DIM = 64
SIGMA = 0.1
OUTLIER_SHARE, OUTLIER_FACTOR = 0.01, 50.0


@dataclass(frozen=True, eq=False)
class Setting:
    """Queries, keys and values, all [batch, heads, tokens, dim] in float32."""

    name: str
    description: str
    query: Tensor
    key: Tensor
    value: Tensor
    is_causal: bool = False
    threshold: float | None = None  # a T that suits these entries, where one is known
    scale: float | None = None  # of the scores; None: 1/√d

    @property
    def n(self) -> int:
        return self.query.shape[-2]

    @property
    def dim(self) -> int:
        return self.query.shape[-1]

    @property
    def factor(self) -> float:
        """What scores are multiplied by."""
        return 1 / math.sqrt(self.dim) if self.scale is None else self.scale


def gaussian(n: int, seed: int = 0, is_causal: bool = False) -> Setting:
    """The paper's efficiency setting: Q, K ~ N(0, 0.1²), V ~ N(0, 1)."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, 1, n, DIM, generator=generator) for _ in range(3))
    text = "entries of Q and K from N(0, 0.1²), V from N(0, 1): the paper's efficiency setting"
    return Setting("gaussian", text, SIGMA * query, SIGMA * key, value, is_causal, threshold=0.4)


def outliers(n: int, seed: int = 0, is_causal: bool = False) -> Setting:
    """The Gaussian setting with 1 % of the queries and of the keys 50 times as long."""
    setting = gaussian(n, seed, is_causal)
    generator = torch.Generator().manual_seed(seed + 1)
    for tokens in (setting.query, setting.key):
        count = max(1, round(OUTLIER_SHARE * n))
        tokens[..., torch.randperm(n, generator=generator)[:count], :] *= OUTLIER_FACTOR
    text = "the Gaussian setting with 1 % of the queries and 1 % of the keys multiplied by 50"
    return replace(setting, name="outliers", description=text)


def heavy_tailed(n: int, seed: int = 0, is_causal: bool = False) -> Setting:
    """Student t entries with 3 degrees of freedom, scaled to standard deviation 0.1."""
    generator = torch.Generator().manual_seed(seed)
    query, key = (_student(n, generator) for _ in range(2))
    value = torch.randn(1, 1, n, DIM, generator=generator)
    text = "entries of Q and K from Student's t with 3 degrees of freedom, standard deviation 0.1"
    return Setting("heavy-tailed", text, query, key, value, is_causal, threshold=0.8)


GENERATED = (gaussian, outliers, heavy_tailed)


def _student(n: int, generator: torch.Generator) -> Tensor:
    freedom = 3
    square = torch.randn(freedom, 1, 1, n, DIM, generator=generator).square().sum(0) / freedom
    deviation = math.sqrt(freedom / (freedom - 2))
    return torch.randn(1, 1, n, DIM, generator=generator) / square.sqrt() * (SIGMA / deviation)


def load_qkv(path: Path, is_causal: bool = False) -> Setting:
    """Tensors q, k, v of a safetensors file, checked, as float32."""
    query, key, value = (_check(name, x) for name, x in zip("qkv", _read(path), strict=True))
    if key.shape[1] != query.shape[1] and query.shape[1] % key.shape[1] == 0:
        group = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    leading = [tuple(x.shape[:2]) for x in (query, key, value)]
    if len(set(leading)) != 1:
        raise InputError(f"--qkv: q, k and v have (batch, heads) = {leading}; they must agree")
    if query.shape[-1] != key.shape[-1]:
        raise InputError(f"--qkv: q has dim {query.shape[-1]} but k has dim {key.shape[-1]}")
    if key.shape[-2] != value.shape[-2]:
        raise InputError(f"--qkv: k has {key.shape[-2]} tokens but v has {value.shape[-2]}")
    if is_causal and query.shape[-2] != key.shape[-2]:
        raise InputError("--causal needs as many queries as keys")
    batch, heads, n, dim = query.shape
    text = f"tensors of {path.name}: batch {batch}, {heads} heads, {n} queries, "
    text += f"{key.shape[-2]} keys, dim {dim}, as float32"
    return Setting(path.stem, text, query, key, value, is_causal)


def _read(path: Path) -> list[Tensor]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise InputError(f"--qkv: there is no file {path}")
    try:
        with safe_open(path, framework="pt") as file:
            names = set(file.keys())
            missing = [name for name in "qkv" if name not in names]
            if missing:
                found = ", ".join(sorted(names)) or "nothing"
                raise InputError(
                    f"--qkv: {path} has no tensor named {' or '.join(missing)}; it holds {found}"
                )
            return [file.get_tensor(name) for name in "qkv"]
    except (SafetensorError, OSError) as error:
        raise InputError(f"--qkv: {path} is not a readable safetensors file ({error})") from None


def _check(name: str, tensor: Tensor) -> Tensor:
    """Floating point, finite, [batch, heads, tokens, dim]."""
    if not tensor.is_floating_point():
        raise InputError(f"--qkv: {name} has dtype {tensor.dtype}; expected floating point")
    if tensor.dim() < 2 or min(tensor.shape) < 1 or tensor.shape[-2] < 2:
        raise InputError(
            f"--qkv: {name} has shape {tuple(tensor.shape)}; expected [..., heads, tokens, dim] or "
            "[tokens, dim] with at least two tokens"
        )
    tensor = tensor.float()
    bad = int((~tensor.isfinite()).sum())
    if bad:
        raise InputError(f"--qkv: {name} has {bad} non-finite entries (NaN or Inf)")
    heads = tensor.shape[-3] if tensor.dim() > 2 else 1
    return tensor.reshape(-1, heads, *tensor.shape[-2:])
