"""Somebody who does what a page says: its files are saved, its commands run, its output compared."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest

from stormproof.core.postgres.database import Database
from support.typing_hand import typed

BLOCK = re.compile(r"(?P<before>[^\n]*)\n\n```(?P<language>\w+)\n(?P<text>.*?)```", re.DOTALL)
SHOWN_ID = re.compile(r"\b\d+-\d+\b")
STATUS = re.compile(r"# exit status (\d+)")
TIMEOUT_S = 240


class Reader:
    """Somebody who does what the page says, in one folder; Spark and what needs a network are left to other tests."""

    def __init__(self, folder: Path, database: Database) -> None:
        self.folder = folder
        self.said = ""
        self.ids: dict[str, str] = {}
        """The ids on the page, and those that the commands gave here."""
        url = database.sqlalchemy_url.render_as_string(hide_password=False)
        self.environment = {**os.environ, "STORMPROOF_DATABASE_URL": url, "COLUMNS": "80"}

    def follow(self, page: str) -> None:
        for block in BLOCK.finditer(page):
            match block["language"]:
                case "python" | "json":
                    self.save(block["before"], block["text"])
                case "sh":
                    self.type(block["text"])
                case "text":
                    self.compare(block["text"])
                case other:
                    pytest.fail(f"a block of {other}: nothing says how it is tested")

    def save(self, before: str, text: str) -> None:
        named = re.search(r"`(\w+\.\w+)`:|`(\w+\.py)`", before)
        assert named, f"no file is named for: {text}"
        path = self.folder / (named[1] or named[2])
        if path.exists():  # one function of it, to be replaced
            (start,) = re.findall(r"^def \w+", text, re.MULTILINE)
            old = path.read_text()
            text = re.sub(rf"{start}.*?(?=\n\n)", text.rstrip(), old, count=1, flags=re.DOTALL)
            assert text != old
        path.write_text(text)

    def type(self, commands: str) -> None:
        if "pip install" in commands or "jars" in commands:
            return
        for shown, here in self.ids.items():
            commands = commands.replace(shown, here)
        commands = re.sub(r"(stormproof run (?!.*--engine).*)", r"\1 --engine inline", commands)  # Spark takes seconds
        self.said = ""
        for line in commands.splitlines():
            status, said = typed(line, self.folder, self.environment, TIMEOUT_S)
            self.said += said
            named = STATUS.search(line)
            expected = int(named[1]) if named else -signal.SIGKILL if "FAILPOINT" in line else 0
            assert status == expected, f"{line}\n{self.said}"

    def compare(self, expected: str) -> None:
        """Each line is in what was said; `...` stands for anything, and an id for another one."""
        for line in expected.splitlines():
            shown = SHOWN_ID.findall(line)
            parts = [".*?".join(map(re.escape, part.split("..."))) for part in SHOWN_ID.split(line)]
            found = re.search(r"\b(\d+-\d+)\b".join(parts), self.said)
            assert found, f"{line!r} is not in:\n{self.said}"
            self.ids.update(zip(shown, found.groups(), strict=True))
