"""A terminal of a given width, in this process: what a command shows a person, line by line."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass

import pytest

from stormproof.trident.cli import main


class Screen(io.StringIO):
    """What a stream shows; it says that it is a terminal, or that it is none."""

    def __init__(self, is_terminal: bool = True, typed: str = "") -> None:
        super().__init__(typed)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


@dataclass(frozen=True, slots=True)
class Terminal:
    """Runs commands as a person does: standard input and both outputs are a terminal."""

    monkeypatch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]
    columns: int = 80

    def ended(self, *arguments: str, typed: str = "") -> tuple[object, str, str]:
        """A command's exit status, and what stands on the screen of both outputs."""
        out, err = Screen(), Screen()
        code: object = 0
        with self.monkeypatch.context() as patched:
            patched.setenv("COLUMNS", str(self.columns))
            patched.setenv("TERM", "dumb")
            patched.setattr(sys, "stdin", Screen(typed=typed))
            patched.setattr(sys, "stdout", out)
            patched.setattr(sys, "stderr", err)
            try:
                main(list(arguments))
            except SystemExit as end:
                code = end.code or 0
        return code, out.getvalue(), err.getvalue()


UNBREAKABLE: int = 50
"""A word of so many characters (a digest, a URL, a path) may be folded: it may not fit at all."""


def broken_words(narrow: str, wide: str) -> set[str]:
    """The words of a narrow screen that the same text does not have where there is room."""
    whole = set(wide.split())
    long = [word for word in whole if len(word) >= UNBREAKABLE]
    words = [word for word in narrow.split() if any(map(str.isalnum, word))]  # a frame is as wide as its screen
    return {word for word in words if word not in whole and not any(word in one for one in long)}
