"""`tools/install_programs.sh`: a program that cannot be installed is named with what to do, and fails nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "tools" / "install_programs.sh"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """The only folder of programs; `apt-get` writes what it is asked for."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("sh", "env", "timeout", "sleep", "touch", "chmod"):
        (folder / name).symlink_to(shutil.which(name) or name)
    return folder


def program(folder: Path, name: str, text: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def run(programs: Path, seconds: int = 5, chosen: Sequence[str] = ("rabbitmq",)) -> str:
    done = subprocess.run(
        [shutil.which("sh") or "sh", str(SCRIPT), *chosen],
        env={
            "PATH": str(programs),
            "RABBITMQ_PROGRAM": str(programs / "rabbitmq-server"),
            "CHROMEDRIVER_PROGRAM": str(programs / "chromedriver"),
            "PROMTOOL_PROGRAM": str(programs / "promtool"),
            "IP_PROGRAM": str(programs / "ip"),
            "SECONDS_MAX": str(seconds),
            "HOME": os.devnull,
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_nothing_is_done_where_it_is_installed(programs: Path) -> None:
    program(programs, "rabbitmq-server", "")
    assert run(programs) == "programs: RabbitMQ is installed\n"


def test_it_is_installed_after_an_update_where_the_lists_are_old(programs: Path) -> None:
    program(programs, "id", "echo 0")
    lists, server = programs / "lists", programs / "rabbitmq-server"
    program(
        programs,
        "apt-get",
        f'case "$*" in *update*) touch {lists};; *) [ -e {lists} ] && touch {server} && chmod +x {server};; esac',
    )
    assert run(programs).endswith("programs: RabbitMQ is installed\n")


@pytest.mark.parametrize(
    ("user", "apt", "says"),
    [
        ("0", None, "no apt-get here"),
        ("1000", "exit 0", "no right to install packages"),
        ("0", "exit 100", "apt-get could not install it"),
        ("0", "exec sleep 60", "apt-get could not install it"),
        ("0", "exit 0", "the package has no "),
    ],
)
def test_what_cannot_be_installed_is_left_out_by_name(programs: Path, user: str, apt: str | None, says: str) -> None:
    program(programs, "id", f"echo {user}")
    if apt is not None:
        program(programs, "apt-get", apt)
    said = run(programs, seconds=1)
    assert says in said
    assert said.endswith("RabbitMQ's tests are left out; install it with: apt-get install rabbitmq-server\n")


def test_all_are_installed_and_one_that_cannot_be_keeps_no_other_back(programs: Path) -> None:
    program(programs, "id", "echo 0")
    driver = programs / "chromedriver"
    program(
        programs,
        "apt-get",
        f'case "$*" in *update*) ;; *chromium-driver*) touch {driver} && chmod +x {driver};; *) exit 100;; esac',
    )
    program(programs, "promtool", "")
    program(programs, "ip", "")
    assert [line for line in run(programs, chosen=()).splitlines() if "installing" not in line] == [
        "programs: apt-get could not install it: RabbitMQ's tests are left out; "
        "install it with: apt-get install rabbitmq-server",
        "programs: Chromium is installed",
        "programs: promtool is installed",
        "programs: ip is installed",
    ]
