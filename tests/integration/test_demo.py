"""The demo in a short form: without Spark, over a part of its text."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
BRIEF = ["--lines", "600", "--batch", "300", "--kills", "1"]
DEMO_TIMEOUT_S = 240
STRAY = {"STORMPROOF_DATABASE_URL": "postgresql://nobody@127.0.0.1:1/nothing", "PGHOST": "127.0.0.1", "PGPORT": "1"}
"""What a user's shell may name: the demo must not touch it."""

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(DEMO_TIMEOUT_S)]


def run_demo(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(DEMO), "--folder", str(folder), "--engine", "inline", *arguments],
        env={**os.environ, **STRAY, "COLUMNS": "200"},
        capture_output=True,
        text=True,
        check=False,
        timeout=DEMO_TIMEOUT_S,
    )


def test_the_demo_counts_exactly_once_through_its_kills_and_notices_a_changed_row(tmp_path: Path) -> None:
    """The control comes first, so that the demo is also seen to begin afresh in the folder of an earlier one."""
    tampered = run_demo(tmp_path / "demo", *BRIEF, "--tamper")
    assert tampered.returncode == 1, tampered.stdout + tampered.stderr
    assert "Postgres: 'the' is counted" in tampered.stdout
    assert tampered.stdout.count("equal to the text's own count") == 1

    done = run_demo(tmp_path / "demo", "--lines", "1200", "--batch", "60")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("SIGKILL at") == 8
    assert "1201 of 1201 messages done" in done.stdout
    assert "dead letter" in done.stdout
    assert "audit verify clean" in done.stdout
    assert done.stdout.count("equal to the text's own count") == 2


def test_a_folder_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    done = run_demo(tmp_path)
    assert done.returncode == 1
    assert "which no demo made" in done.stdout
    assert (tmp_path / "mine").read_text() == "precious"
