"""Types a page's commands: each in a process of its own, forked from one that has imported everything already."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from stormproof.core.base.failpoint import ENV_DRIVER_PID

_CONTEXT = multiprocessing.get_context("forkserver")
_IMPORTED = (
    "stormproof.trident.cli.app",
    "stormproof.trident.driver.run",
    "stormproof.trident.topology.stream",
    "stormproof.sinks.delta.sink",
    "stormproof.sinks.postgres.sink",
    "stormproof.migrations",
    "adbc_driver_postgresql.dbapi",
    "pandas",
    "sqlglot",
)
_CONTEXT.set_forkserver_preload([*_IMPORTED, "support.typing_hand"])


def typed(line: str, folder: Path, environment: Mapping[str, str], timeout_s: float) -> tuple[int, str]:
    """The exit status of a line for the shell, and what it said on both streams; `A=B` before a command is a variable."""
    words = shlex.split(line, comments=True)
    variables = dict[str, str]()
    while words and "=" in words[0]:
        name, _, value = words.pop(0).partition("=")
        variables[name] = value
    if not words or words[0] not in ("stormproof", "python") or "<" in words or ">" in words:
        ended = subprocess.run(
            ["bash", "-c", line], cwd=folder, check=False, capture_output=True, text=True, timeout=timeout_s
        )
        return ended.returncode, ended.stdout + ended.stderr
    said = folder / ".said"
    known = {name: value for name, value in environment.items() if name != ENV_DRIVER_PID}  # this process is not it
    process = _CONTEXT.Process(target=_run, args=(words, str(folder), {**known, **variables}, str(said)))
    process.start()
    process.join(timeout_s)
    assert process.exitcode is not None, f"{line}: not done after {timeout_s} s"
    text = said.read_text()
    said.unlink()
    return process.exitcode, text


def _run(words: list[str], folder: str, environment: dict[str, str], said: str) -> None:
    """Be that command: never returns in order."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    out = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(out, stream)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False, buffering=1)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = words
    if words[0] == "python":
        sys.argv = words[1:]
        sys.path[0] = folder
        runpy.run_path(words[1], run_name="__main__")
        return
    from stormproof.trident.cli import main

    main()
