"""Every command, by the program's own registry: what its `--help` says, and how that looks at 80 columns."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import Final

import pytest
from support.registry import commands, groups
from support.terminal import Terminal, broken_words

COMMANDS: Final = dict(commands())


def test_the_registry_is_walked() -> None:
    assert {"run", "dead-letters edit", "ledger skip"} <= set(COMMANDS)
    assert {"", "dead-letters"} <= set(groups())


def test_each_command_and_each_of_its_words_says_what_it_is() -> None:
    for path, command in COMMANDS.items():
        what, *_ = (command.help or "").split("\n\n")
        assert what.strip().endswith("."), f"{path}: its help begins with a sentence"
        assert what[:1].isupper(), path
        for parameter in command.params:
            assert getattr(parameter, "help", None), f"{path}: {parameter.name} is not explained"
        # The terminal's markup would swallow it.
        texts = [command.help or "", *(str(getattr(parameter, "help", "")) for parameter in command.params)]
        assert not any(re.search(r"\[[a-z]+\]", text) for text in texts), f"{path}: words in brackets are not shown"
        named = {option for parameter in command.params for option in parameter.opts}
        assert "--json" in named, f"{path} prints no JSON"


def test_help_fits_80_columns_and_breaks_no_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow, wide = (Terminal(monkeypatch, capsys, columns) for columns in (80, 240))
    for path in [*COMMANDS, *groups()]:
        status, out, err = narrow.ended(*path.split(), "--help")
        assert (status, err) == (0, ""), path
        assert out.count("Usage: ") == 1, path
        assert max(map(len, out.splitlines())) <= 80, path
        assert broken_words(out, wide.ended(*path.split(), "--help")[1]) == set(), path


def test_a_broken_word_is_seen() -> None:
    """The check itself: a table whose words are folded is caught."""
    assert broken_words("messages commi\ntted", "messages committed") == {"commi", "tted"}
    assert broken_words("a http://x/" + "y" * 60 + "\n" + "y" * 30, "a http://x/" + "y" * 90) == set()


def test_a_real_terminal_of_80_columns() -> None:
    """The program in a process of its own, on a pseudo-terminal."""
    import fcntl
    import pty
    import struct
    import termios

    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    command = [sys.executable, "-m", "stormproof", "audit", "message", "words", "1-1"]
    environment["STORMPROOF_DATABASE_URL"] = "mysql://nowhere.example.org/of/no/use?to=anybody"
    child = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:  # Linux says so when the last writer has gone
        pass
    os.close(ours)
    assert child.wait(60) == 2
    lines = shown.decode().replace("\r", "").splitlines()
    assert "STORMPROOF_DATABASE_URL" in shown.decode()
    assert max(map(len, lines)) <= 80, lines
