"""The command line without a database: usage errors, exit statuses, JSON, loading, and what `--help` imports."""

from __future__ import annotations

import inspect
import json
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from stormproof.core.base.errors import CannotTell, Fenced, SinkRefused, StormproofError, TopologyError, UsageError
from stormproof.trident.audit.report import ViolationKind
from stormproof.trident.cli import main
from stormproof.trident.cli.app import app
from stormproof.trident.cli.loading import bind_parameters, load_topology, parse_parameters
from stormproof.trident.cli.logs import JsonLines
from stormproof.trident.cli.output import exit_status, guarded, json_text
from stormproof.trident.driver.control_line import Stopping

FILE = """
from stormproof import MemorySink, MemorySource, Topology

def topology(lake: str, parts: int = 2, fast: bool = False) -> Topology:
    t = Topology(f"made-{parts}-{fast}")
    t.stream("lines", MemorySource("lines")).into(MemorySink(lake))
    return t

def nothing():
    return None

ready = topology("lake")
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", [*sys.path])
    path = tmp_path / f"topology_{tmp_path.name.replace('-', '_')}.py"
    path.write_text(FILE)
    return str(path)


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from stormproof.trident.cli.app import app\n"
        "heavy = {'pyspark', 'pyarrow', 'sqlalchemy', 'psycopg', 'deltalake', 'pydantic'} & set(sys.modules)\n"
        "sys.exit(', '.join(heavy) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def commands(of: typer.Typer) -> Iterator[Callable[..., None]]:
    for one in of.registered_commands:
        assert one.callback is not None
        yield one.callback
    for group in of.registered_groups:
        assert group.typer_instance is not None
        yield from commands(group.typer_instance)


def test_each_commands_work_takes_the_commands_arguments() -> None:
    works = {work: one for one in commands(app) if (work := getattr(one, "work", None)) is not None}
    assert len(works) > 20
    for work, declared in works.items():
        module, _, name = work.rpartition(".")
        does = getattr(import_module(f"stormproof.trident.cli.{module}"), name)
        inspect.signature(does).bind(**dict.fromkeys(inspect.signature(declared).parameters))


def test_bash_completes_commands_and_options(tmp_path: Path) -> None:
    script = tmp_path / "completion"
    script.write_bytes(
        subprocess.check_output(
            [sys.executable, "-m", "stormproof"], env={**os.environ, "_STORMPROOF_COMPLETE": "source_bash"}
        )
    )
    program = tmp_path / "stormproof"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m stormproof "$@"\n')
    program.chmod(0o755)

    def completed(*words: str) -> set[str]:
        typed = f"COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}"
        shell = f'source "{script}"; {typed}; _stormproof_completion "{program}"; printf "%s\\n" "${{COMPREPLY[@]}}"'
        return set(subprocess.check_output(["bash", "-c", shell], text=True).split())

    assert completed("stormproof", "dead-le") == {"dead-letters"}
    assert {"list", "requeue"} <= completed("stormproof", "dead-letters", "")
    assert completed("stormproof", "run", "--until") == {"--until-idle"}


def test_an_interrupt_while_the_command_line_is_imported_is_one_line() -> None:
    code = (
        "import sys\n"
        "class Interrupts:\n"
        "    def find_spec(self, name, *more):\n"
        "        if name == 'stormproof.trident.cli.output': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Interrupts())\n"
        "from stormproof.trident.cli import main; main(['--version'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (130, "stormproof: interrupted\n")


def test_version() -> None:
    done = CliRunner().invoke(app, ["--version"])
    assert (done.exit_code, done.stdout) == (0, f"stormproof {version('stormproof')}\n")


@pytest.mark.parametrize(
    "arguments",
    [["nope"], ["run"], ["queue", "put", "lines"], ["audit", "txn", "words", "x"], ["audit", "verify"], ["--nope"]],
)
def test_wrong_usage_is_status_2(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "no_colon.py"], "write FILE.py:NAME, as in no_colon.py:topology"),
        (["run", "missing.py:topology"], "no such file"),
        (["run", "missing.py:topology", "--engine", "warp"], "known are spark, inline"),
        (["queue", "put", "lines", "--lines", "missing.txt"], "no such file"),
        (["dead-letters", "drop", "words"], "name the messages' ids, or --all"),
        (["ledger", "retry", "words", "1", "--why", "x"], "instead: stormproof retry"),
        (["rejects", "list", "words", "--sink", "s"], "instead: stormproof dead-letters"),
        (["db", "url"], "instead: stormproof psql --url"),
        (["queue", "stats", "words"], "instead: stormproof queue list QUEUE"),
    ],
)
def test_a_refused_call_is_one_line_and_status_2(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*arguments, "--json"])
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert text in err
    assert len(err.splitlines()) == 1
    error = json.loads(out)["error"]
    assert text in error["message"]
    assert set(error) == {"kind", "message", "details"}


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (UsageError("x"), 2),
        (TopologyError("x"), 2),
        (Fenced("x"), 3),
        (CannotTell("x"), 4),
        (SinkRefused("x"), 1),
    ],
)
def test_each_error_has_its_exit_status(error: StormproofError, status: int) -> None:
    assert exit_status(error) == status


def test_an_interrupt_is_status_130_and_a_bug_is_status_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, guarded(as_json=True):
        raise KeyboardInterrupt
    assert ended.value.code == 130
    assert json.loads(capsys.readouterr().out)["error"]["kind"] == "interrupted"
    with pytest.raises(SystemExit) as ended, guarded(as_json=False):
        raise ZeroDivisionError("oops")
    assert ended.value.code == 1
    assert "ZeroDivisionError: oops" in capsys.readouterr().err


def test_reports_have_a_json_form() -> None:
    at = datetime(2000, 1, 1, tzinfo=UTC)
    assert json.loads(json_text({ViolationKind.CHAIN: (1, None, at, frozenset({"a"}))})) == {
        "chain": [1, None, "2000-01-01T00:00:00+00:00", ["a"]]
    }
    with pytest.raises(TypeError, match="bytes"):
        json_text(b"x")


def test_a_function_gets_its_parameters_by_name_and_type(file: str) -> None:
    made, module = load_topology(f"{file}:topology", ["lake=x", "parts=3", "fast=yes"])
    assert made.name == "made-3-True"
    assert sys.modules[module.__name__] is module
    assert load_topology(f"{file}:ready", [])[0].name == "made-2-False"


@pytest.mark.parametrize(
    ("target", "parameters", "text"),
    [
        ("topology", [], "needs lake"),
        ("topology", ["lake=x", "lak=y"], "no parameter lak; known: lake, parts, fast"),
        ("topology", ["lake=x", "parts=many"], "not of type int"),
        ("topology", ["lake"], "write KEY=VALUE"),
        ("topology", ["lake=x", "lake=y"], "stands twice"),
        ("topologie", [], "it has ready, topology"),
        ("nothing", [], "returned a NoneType"),
        ("ready", ["lake=x"], "takes no --param"),
    ],
)
def test_a_topology_that_cannot_be_loaded_is_named(file: str, target: str, parameters: list[str], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        load_topology(f"{file}:{target}", parameters)


def test_any_parameter_goes_where_the_function_takes_any() -> None:
    def any_(**more: str) -> None: ...

    assert bind_parameters(any_, parse_parameters(["a=1", "b==2"]), "x") == {"a": "1", "b": "=2"}


def test_a_log_line_is_json_with_its_facts() -> None:
    import logging

    record = logging.LogRecord("stormproof.txn", logging.INFO, "", 0, "txn %s", ('{"txid": 1}',), None)
    line = json.loads(JsonLines().format(record))
    assert line["txn"] == {"txid": 1}
    plain = logging.LogRecord("stormproof.run", logging.INFO, "", 0, "hello {", (), None)
    assert json.loads(JsonLines().format(plain))["message"] == "hello {"


class _Asked:
    stops = 0

    def request_stop(self) -> None:
        self.stops += 1

    def interrupt(self, error: BaseException) -> None:
        raise AssertionError("it was asked once") from error


def test_the_first_signal_asks_and_the_handlers_are_given_back() -> None:
    asked = _Asked()
    before = signal.getsignal(signal.SIGTERM)
    with Stopping() as stopping:
        stopping.attach(asked)
        signal.raise_signal(signal.SIGTERM)
        assert asked.stops == 1
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_signal_before_everything_stands_is_kept_until_then() -> None:
    asked = _Asked()
    with Stopping() as stopping:
        signal.raise_signal(signal.SIGTERM)
        assert asked.stops == 0
        stopping.attach(asked)
    assert asked.stops == 1
