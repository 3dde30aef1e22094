"""The command line, run in this process."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from stormproof.core.postgres.database import Database
from stormproof.trident.cli import main


@dataclass(frozen=True, slots=True)
class CommandLine:
    """Runs commands with `--json`; what each printed, once it ended with the exit status that it should."""

    capture: pytest.CaptureFixture[str]

    def __call__(self, *arguments: str, status: int = 0) -> Any:
        code, out, err = self.ended(*arguments, "--json")
        assert code == status, (code, out, err)
        return json.loads(out)

    def text(self, *arguments: str, status: int = 0) -> str:
        """What a command for people printed."""
        code, out, err = self.ended(*arguments)
        assert code == status, (code, out, err)
        return out

    def ended(self, *arguments: str) -> tuple[object, str, str]:
        """A command's exit status, and what it printed on both outputs."""
        self.capture.readouterr()
        code: object = 0
        try:
            main(list(arguments))
        except SystemExit as end:
            code = end.code or 0
        out, err = self.capture.readouterr()
        return code, out, err


def command_line_in(
    folder: Path,
    database: Database,
    file: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    capture: pytest.CaptureFixture[str],
) -> CommandLine:
    """A command line whose working folder has a file with topologies, and which finds this database."""
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (folder / file).write_text(text)
    return CommandLine(capture)
