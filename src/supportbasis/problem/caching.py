"""Typed caches that a module keeps for objects it does not own."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

Owner = TypeVar("Owner")
Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class WeakCache(Generic[Owner, Key, Value]):
    """What is derived once from an owner (a head, a plan), and dropped with it."""

    def __init__(self) -> None:
        self._kept: WeakKeyDictionary[Owner, dict[Key, Value]] = WeakKeyDictionary()

    def get(self, owner: Owner, key: Key, make: Callable[[], Value]) -> Value:
        """What is kept under ``key``, made where it is not."""
        kept = self._kept.setdefault(owner, {})
        if key not in kept:
            kept[key] = make()
        return kept[key]

    def drop(self, owner: Owner) -> None:
        """Drop what is kept for an owner that lives on."""
        self._kept.pop(owner, None)
