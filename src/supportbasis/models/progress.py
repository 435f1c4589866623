"""A bar on standard error, if tqdm is installed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any


class Progress:
    """Steps of a long piece of work."""

    def __init__(self, shown: bool, total: int, name: str = "planning") -> None:
        self._bar: Any = None
        if shown and find_spec("tqdm") is not None:
            from tqdm.auto import tqdm  # type: ignore[import-untyped]

            self._bar = tqdm(total=total, desc=name, leave=False, dynamic_ncols=True)

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def say(self, text: str) -> None:
        if self._bar is not None:
            self._bar.set_postfix_str(text)

    def step(self, text: str) -> None:
        """One step is done, or about to be: ``text`` says which."""
        self.say(text)
        if self._bar is not None:
            self._bar.update()
