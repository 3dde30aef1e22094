"""Writes docs/cli.md from the command line's own help: `.venv/bin/python tools/cli_doc.py`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

import typer
from typer.cli import get_docs_for_click

from stormproof.trident.cli.app import app

PATH: Final = Path(__file__).resolve().parents[1] / "docs" / "cli.md"
HEAD: Final = """# Command line

Every command, its arguments and options. Made by `tools/cli_doc.py` from the program's own help: do not edit.

What a command has found goes to standard output; progress and errors go to standard error. With `--json` standard output
is one JSON document. Commands use the settings of the working folder: see [settings.md](settings.md).

The Tab key completes commands and options after `stormproof --install-completion`, typed in the shell that is meant: bash, zsh, fish
or PowerShell. It adds lines to that shell's start-up files; `--show-completion` prints the script instead.

| exit status | meaning |
| --- | --- |
| 0 | done |
| 1 | a violation, or a failure |
| 2 | wrong usage |
| 3 | fenced: another driver of the same topology took over |
| 4 | cannot tell: the evidence is gone |
| 130 | interrupted |

"""


def text() -> str:
    """The page."""
    command = typer.main.get_command(app)
    context = typer.Context(command, info_name="stormproof")
    made = get_docs_for_click(obj=command, ctx=context, name="stormproof")
    made = re.sub(r"^# `stormproof`\n\n.*?(?=^## )", "", made, flags=re.DOTALL | re.MULTILINE)  # said above
    return HEAD + re.sub(r"\n{3,}", "\n\n", made).strip() + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
