"""The handles of a server's deliveries, by which they are confirmed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any


class Handles:
    """Handles by the number of their message. Most messages come once, so a handle that is alone stands without a list."""

    __slots__ = ("_first", "_further")

    def __init__(self) -> None:
        self._first: dict[int, Any] = {}
        self._further: dict[int, list[Any]] = {}

    def __len__(self) -> int:
        """How many messages have one."""
        return len(self._first)

    def add(self, numbers: Sequence[int], handles: Sequence[Any]) -> None:
        """One more handle for each of these messages."""
        added = dict(zip(numbers, handles, strict=True))
        if len(added) == len(numbers) and self._first.keys().isdisjoint(added):
            self._first.update(added)
            return
        for number, handle in zip(numbers, handles, strict=True):
            if number in self._first:
                self._further.setdefault(number, []).append(handle)
            else:
                self._first[number] = handle

    def numbers(self) -> list[int]:
        """The messages that have one."""
        return list(self._first)

    def pop(self, numbers: Iterable[int]) -> list[Any]:
        """All handles of these messages; they are not kept."""
        popped: list[Any] = []
        for number in numbers:
            popped.append(self._first.pop(number))
            popped += self._further.pop(number, ())
        return popped

    def clear(self) -> None:
        """Keep none."""
        self._first.clear()
        self._further.clear()
