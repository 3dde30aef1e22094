"""A terminal of a given width, in this process: what a command shows a person, line by line."""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass

import pytest

from stormproof.trident.cli import main


class _Typed(io.StringIO):
    def isatty(self) -> bool:
        return True


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


@dataclass(frozen=True, slots=True)
class Terminal:
    """Runs commands as a person does: standard input and both outputs are a terminal."""

    monkeypatch: pytest.MonkeyPatch
    capture: pytest.CaptureFixture[str]
    columns: int = 80

    def ended(self, *arguments: str, typed: str = "") -> tuple[object, str, str]:
        """A command's exit status, and what stands on the screen of both outputs."""
        out, err = _Screen(), _Screen()
        code: object = 0
        with self.monkeypatch.context() as patched:
            patched.setenv("COLUMNS", str(self.columns))
            patched.setenv("TERM", "dumb")
            patched.setattr(sys, "stdin", _Typed(typed))
            patched.setattr(sys, "stdout", out)
            patched.setattr(sys, "stderr", err)
            try:
                main(list(arguments))
            except SystemExit as end:
                code = end.code or 0
        return code, out.getvalue(), err.getvalue()
