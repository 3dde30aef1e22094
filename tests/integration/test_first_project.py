"""What `init` writes runs as it says; `psql` shows the database behind it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from support.command_line import CommandLine

from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.trident.cli import psql
from stormproof.trident.cli.init import FILES

pytestmark = pytest.mark.postgres


@pytest.fixture
def project(database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: CommandLine) -> Path:
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.chdir(tmp_path)
    assert command("init", "first") == {"folder": str(tmp_path / "first"), "files": list(FILES)}
    monkeypatch.chdir(tmp_path / "first")
    return tmp_path / "first"


def test_the_first_topology_runs_and_its_dead_letter_and_sums_are_there(project: Path, command: CommandLine) -> None:
    command("queue", "put", "orders", "--lines", "orders.jsonl")
    done = command("run", "orders.py:topology", "--engine", "inline", "--until-idle")
    assert (done["messages"], done["dead_letters"]) == (3, 1)
    (answer,) = command("psql", "-c", "select who, total from spent order by who")
    assert (answer["columns"], answer["rows"]) == (["who", "total"], [["ada", 300], ["bob", 1999]])
    assert command("audit", "verify", "orders")["violations"] == []


def test_with_json_every_line_of_a_runs_log_is_an_object(project: Path, command: CommandLine) -> None:
    code, _, said = command.ended("run", "orders.py:topology", "--engine=inline", "--until-idle", "--log-format=json")
    assert code == 0
    messages = [json.loads(line).get("message") for line in said.splitlines()]
    assert "running 'orders' exactly-once on inline; Ctrl-C stops it in order" in messages


def test_its_own_test_passes(project: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_orders.py"]
    done = subprocess.run(command, cwd=project, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout


def test_its_settings_and_its_unit_are_ones_that_are_known(project: Path) -> None:
    assert Settings().batch_messages == 10_000
    commented = [line[2:] for line in (project / "stormproof.toml").read_text().splitlines() if " = " in line]
    names = {line.partition(" = ")[0].lstrip() for line in commented if line.startswith(("master", "staging"))}
    assert names <= set(Settings.model_fields)
    if shutil.which("systemd-analyze"):
        unit = (project / "orders.service").read_text().replace("/srv/orders/.venv/bin/stormproof", sys.executable)
        (project / "checked.service").write_text(
            unit.replace("WorkingDirectory=/srv/orders", f"WorkingDirectory={project}")
        )
        done = subprocess.run(
            ["systemd-analyze", "verify", str(project / "checked.service")], capture_output=True, text=True, check=False
        )
        assert "Unknown" not in done.stderr


def test_nothing_is_overwritten(project: Path, command: CommandLine) -> None:
    (project / "orders.py").write_text("mine")
    (project / "stormproof.toml").unlink()
    said = command("init", ".", status=2)["error"]["message"]
    assert "has orders.py, test_orders.py" in said
    assert (project / "orders.py").read_text() == "mine"
    assert not (project / "stormproof.toml").exists()


def test_sql_runs_without_the_program_psql(project: Path, command: CommandLine) -> None:
    sql = "create table t (n numeric, b bytea); insert into t values (1.5, 'a'); select * from t"
    statuses = [(a["status"], a["rows"]) for a in command("psql", "-c", sql, "-c", "select 1")]
    assert statuses == [
        ("CREATE TABLE", []), ("INSERT 0 1", []), ("SELECT 1", [["1.5", "b'a'"]]), ("SELECT 1", [[1]]),
    ]  # fmt: skip
    error = command("psql", "-c", "selec", status=2)["error"]
    assert 'syntax error at or near "selec"' in error["message"]
    assert error["details"]["sqlstate"] == "42601"


def test_without_the_program_psql_it_says_what_to_do(
    project: Path, command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psql, "PSQL", "no-such-psql")
    code, _, said = command.ended("psql")
    assert code == 2
    assert "stormproof psql -c" in said


def test_the_program_psql_gets_the_database_by_variables_and_keeps_its_status(project: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "stormproof", "psql", "--", *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)

    assert run("-XAtc", "select 40 + 2").stdout == "42\n"
    assert run("-Xc", "selec").returncode == 1


def test_the_url_hides_the_password_and_is_one_that_libpq_reads(
    project: Path, command: CommandLine, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = command("psql", "--url")["url"]
    with psycopg.connect(url) as connection:
        assert connection.execute("select 1").fetchone() == (1,)
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", "postgresql://me:se%40cret@db.example:5433/orders?sslmode=require")
    shown = command.text("psql", "--url")
    assert shown == "postgresql://me:***@db.example:5433/orders?sslmode=require\n"
    assert "cret" not in json.dumps(command("psql", "--url"))
    whole = command("psql", "--url", "--show-password")["url"]
    assert Database.from_url(whole) == Database.from_url(os.environ["STORMPROOF_DATABASE_URL"])


@pytest.mark.parametrize("host", ["a,b", "::1", "/var/run/postgresql"])
def test_a_url_holds_every_kind_of_host(host: str) -> None:
    port = "1,2" if "," in host else "5433"
    given = Database.of({"host": host, "port": port, "user": "m e", "password": "p@/?", "dbname": "d b"})
    assert Database.from_url(given.url(show_password=True)) == given
    assert "p@" not in given.url()
