"""What a user's file, a closed output, a full disk or an interrupt make of a command: one line that names the thing."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.command_line import CommandLine
from support.processes import Child

from stormproof.trident.cli.output import guarded


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ndef topology(:\n", "mine.py, line 2: invalid syntax: def topology(:; repair it"),
        (
            "\nimport no_such_module\n",
            "mine.py, line 2: ModuleNotFoundError: No module named 'no_such_module'; install it",
        ),
        (
            "import neighbour\n",
            "neighbour.py, line 3: ZeroDivisionError: division by zero, raised while the file was loaded",
        ),
        (
            "def topology():\n    return {}['x']\n",
            "mine.py, line 2: KeyError: 'x', raised while topology() built the topo",
        ),
        ("import sys\nsys.exit(0)\n", "mine.py, line 2: it ended the program (status 0) while the file was loaded"),
        (
            "from __future__ import annotations\ndef topology(n: Missing): ...\n",
            "its annotations cannot be read (name 'Missing' is not defined)",
        ),
        ("topology = 3\n", "neither a Topology nor a function"),
        ("def topology(): return open('/nowhere/x')\n", "FileNotFoundError: [Errno 2] No such file or directory"),
        ("a\0b\n", "mine.py"),
        ("# \xff\n", "mine.py"),
    ],
)
def test_a_fault_in_the_users_file_is_named_with_its_line(
    folder: Path, command: CommandLine, text: str, said: str
) -> None:
    (folder / "neighbour.py").write_text("\n\n1/0\n")
    (folder / "mine.py").write_bytes(text.encode("latin-1"))
    sys.modules.pop("neighbour", None)
    code, out, err = command.ended("explain", "mine.py:topology", "--json")
    assert code == 2, err
    assert said in err
    assert len(err.splitlines()) == 1
    assert json.loads(out)["error"]["kind"] == "usage"


def test_a_folder_and_a_missing_file_are_told_apart(folder: Path, command: CommandLine) -> None:
    (folder / "mine.py").mkdir()
    assert "this is a folder" in command("explain", "mine.py:topology", status=2)["error"]["message"]
    assert "no such file" in command("explain", "other.py:topology", status=2)["error"]["message"]


def test_the_whole_way_to_a_users_error_is_shown_on_request(
    folder: Path, command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "mine.py").write_text("def deep():\n    1/0\ndeep()\n")
    monkeypatch.setenv("PYTHONFAULTHANDLER", "1")
    assert 'mine.py", line 2, in deep' in command.ended("explain", "mine.py:topology")[2]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.ENOTDIR])
def test_what_the_file_system_refuses_is_no_unexpected_error(number: int, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, guarded(as_json=True):
        raise OSError(number, os.strerror(number), "/somewhere/file")
    out, err = capsys.readouterr()
    assert ended.value.code == 1
    assert err.startswith(f"stormproof: {os.strerror(number)}: /somewhere/file; ")
    assert len(err.splitlines()) == 1
    assert json.loads(out)["error"]["kind"] == "environment"


# A command whose output or connection breaks, as it is called by a shell.
COMMAND = """
import os, sys
from stormproof.trident.cli import main
from stormproof.trident.cli import init
{change}
main(["init", "x"])
"""


def run(change: str, stdout: int | None = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", COMMAND.format(change=change)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=60,
    )


def test_a_reader_that_has_gone_ends_it_in_silence() -> None:
    read, write = os.pipe()
    os.close(read)
    done = run("init.write_project = lambda *_, **__: sys.stdout.write('a line\\n')", write)
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_a_broken_pipe_of_somebody_else_is_said() -> None:
    done = run("def broken(*_, **__): raise BrokenPipeError(32, 'Broken pipe')\ninit.write_project = broken")
    assert done.returncode == 1
    assert "BrokenPipeError" in done.stderr


def test_an_output_that_is_full_or_closed_is_no_traceback() -> None:
    with open("/dev/full", "w") as full:
        done = run("init.write_project = lambda *_, **__: sys.stdout.write('a line\\n')", full.fileno())
    assert done.returncode == 1
    assert done.stderr.startswith("stormproof: No space left on device")
    assert "Traceback" not in done.stderr
    done = run("init.write_project = lambda *_, **__: print('x')\nsys.stdout = None")
    assert (done.returncode, done.stderr) == (0, "")


def test_an_interrupt_at_any_moment_is_one_line() -> None:
    waiting = (
        "import signal\ndef wait(*_, **__):\n    print('up', flush=True)\n    signal.pause()\ninit.write_project = wait"
    )
    with Child(
        [
            sys.executable,
            "-c",
            "import signal; signal.signal(2, signal.default_int_handler)\n" + COMMAND.format(change=waiting),
        ]
    ) as child:
        assert child.line() == "up"
        child.kill(signal.SIGINT)
        assert child.wait() == 130


def test_settings_that_others_may_write_or_that_cannot_be_read_are_refused(folder: Path, command: CommandLine) -> None:
    path = folder / "stormproof.toml"
    path.write_text("batch_messages = 1\n")
    path.chmod(0o666)
    said = command("psql", "--url", status=2)["error"]["message"]
    assert f"{path} is not used: every user may write it" in said
    path.chmod(0o644)
    path.write_bytes(b"home = '\xff'\n")
    assert "stormproof.toml is not UTF-8" in command("psql", "--url", status=2)["error"]["message"]
