"""What a model is shown: a text of our own, the letter h repeated, or any file; or pictures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from torch import Tensor

from supportbasis import InputError

from .models import Loaded

NATURAL, REPEATED = "natural text", "h repeated"
LETTERS = 2048
WINDOW = 2048
FEWEST = 16  # tokens of which a distribution can be made


@dataclass(frozen=True, eq=False)
class Shown:
    """Windows of input for one model: tokens [windows, n] or pictures [1, channels, s, s]."""

    name: str
    windows: Tensor
    said: str  # how it came about, for the user
    is_picture: bool = False

    @property
    def digest(self) -> str:
        """Changes with whatever is shown."""
        return sha256(self.windows.contiguous().numpy().tobytes()).hexdigest()[:8]


def inputs_for(
    loaded: Loaded, file: Path | None, window: int | None, most: int | None = None
) -> list[Shown]:
    """The user's file, or the two texts of our own; pictures for a model that sees.

    Texts come in windows of ``window`` tokens, at most ``most`` of them.
    """
    if loaded.encode is None:
        return _pictures(loaded, file)
    if file is not None:
        return [_natural(loaded, loaded.encode, _read(file), file.name, (window, most), own=False)]
    natural = _natural(loaded, loaded.encode, own_text(), NATURAL, (window, most), own=True)
    return [natural, _repeated(loaded, loaded.encode, window)]


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"--text: there is no file {file}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"--text: {file} is not a readable text in UTF-8 ({error})") from None


def _longest(loaded: Loaded, window: int | None) -> int:
    """Tokens of a window: as asked, else 2048 or what the model can take."""
    if window is None:
        return min(WINDOW, loaded.context or WINDOW)
    if loaded.context is not None and window > loaded.context:
        raise InputError(
            f"--window: {window} tokens are more than the {loaded.context} that {loaded.name} takes"
        )
    return window


def own_text() -> str:
    """A story of our own, in plain English."""
    return (Path(__file__).parent / "natural.txt").read_text(encoding="utf-8")


def _natural(
    loaded: Loaded,
    encode: Callable[[str], Tensor],
    text: str,
    name: str,
    windows: tuple[int | None, int | None],
    *,
    own: bool,
) -> Shown:
    """As many whole windows as the text holds and the user wants: (tokens of one, how many)."""
    ids, (window, most) = encode(text), windows
    n = _longest(loaded, window)
    if own and window is None:
        n = min(n, len(ids))
    least = max(n, FEWEST)
    if len(ids) < least:
        what = "the built-in text" if own else f"--text: {name}"
        shorter = f" or --window {len(ids)}" if len(ids) >= FEWEST else ""
        raise InputError(
            f"{what} has {len(ids)} tokens, fewer than a window of {least}; give a longer text"
            f"{shorter}"
        )
    count = min(len(ids) // n, most or len(ids))
    said = f"{name}: {len(text)} characters, {len(ids)} tokens, {count} × {n} shown"
    return Shown(name, ids[: count * n].view(count, n), said)


def _repeated(loaded: Loaded, encode: Callable[[str], Tensor], window: int | None) -> Shown:
    """The paper's worst case. Tokenisers merge letters, so the tokens are counted."""
    ids = encode("h" * LETTERS)
    n = min(len(ids), _longest(loaded, window))
    said = f"{REPEATED}: {LETTERS} letters, {len(ids)} tokens, {len(ids.unique())} different"
    said += f", the first {n} shown" if n < len(ids) else ""
    return Shown(REPEATED, ids[:n].view(1, n), said)


def _pictures(loaded: Loaded, file: Path | None) -> list[Shown]:
    """Soft waves, which have edges and shades as pictures do, and one grey."""
    assert loaded.picture is not None
    if file is not None:
        raise InputError(f"--text: {loaded.name} sees pictures, not text; leave --text out")
    channels, size = loaded.picture
    y, x = torch.meshgrid(*[torch.linspace(0, 1, size)] * 2, indexing="ij")
    waves = [
        torch.sin(9 * x + 4 * c) * torch.cos(13 * y - c) + ((x - 0.5).hypot(y - 0.4) < 0.2)
        for c in range(channels)
    ]
    picture = torch.stack(waves)[None].clamp(-1, 1)
    return [
        Shown("picture", picture, f"picture: {size} × {size}, drawn by formula", True),
        Shown("one grey", torch.zeros_like(picture), f"one grey: {size} × {size}", True),
    ]
