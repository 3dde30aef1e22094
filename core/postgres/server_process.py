"""The contents of `postmaster.pid`, and the Postgres processes visible here that work in a data folder."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import psutil

CONTROL_FILE: Final = "global/pg_control"
_IDENTIFIER_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class PidFile:
    """The contents of `postmaster.pid`, by line: 1 pid, 3 start time, 5 socket folder, 8 status.

    The pid is that in the server's PID namespace, the folder that in its mount namespace.
    """

    pid: int
    started: int
    socket_folder: str
    ready: bool


def read_pid_file(data: Path) -> PidFile | None:
    """The data folder's pid file; None where there is none, or where it is still being written."""
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
    except FileNotFoundError:
        return None
    if not lines or not lines[0].lstrip("-").isdigit():
        return None
    return PidFile(
        pid=abs(int(lines[0])),
        started=int(lines[2]) if len(lines) > 2 and lines[2].strip().isdigit() else 0,
        socket_folder=lines[4].strip() if len(lines) > 4 else "",
        ready=len(lines) > 7 and lines[7].strip() == "ready",
    )


def system_identifier(data: Path) -> int:
    """The number that initdb gave this database cluster, from its control file."""
    with (data / CONTROL_FILE).open("rb") as control:
        return int.from_bytes(control.read(_IDENTIFIER_BYTES), "little")


def serves(pid: int, data: Path) -> bool:
    """Whether the process with this pid here is a living Postgres that works in the data folder."""
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.name() == "postgres" and _works_in(process, data)
    except (psutil.NoSuchProcess, psutil.AccessDenied):
        return False  # denied: another user's process has the number now


def processes_in(data: Path) -> list[int]:
    """The Postgres processes visible here that work in the data folder, also those whose server has ended."""
    found: list[int] = []
    for process in psutil.process_iter():
        try:
            if process.name() == "postgres" and _works_in(process, data):
                found.append(process.pid)
        except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            continue  # ended meanwhile, or another user's
    return found


def _works_in(process: psutil.Process, data: Path) -> bool:
    """Compares the folder itself, not its name: a folder has several where it is linked, mounted twice, or was moved."""
    folder = f"/proc/{process.pid}/cwd"
    try:
        return os.path.samefile(folder if os.path.exists("/proc/self/cwd") else process.cwd(), data)
    except PermissionError:
        return str(data) in process.cmdline()  # a server that runs as nobody, and root may not look at its folder
    except (FileNotFoundError, ProcessLookupError):
        return False  # it ended meanwhile, or there is no data folder
