"""Executors that lack something are named by host before a message is opened; none is blamed. Processes of their own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest
from support.command_line import command_line_in
from support.queues import prepared_database, put

from stormproof.core.postgres.database import Database

pytestmark = [
    pytest.mark.spark(own=True),
    pytest.mark.postgres,
    pytest.mark.timeout(400),
    pytest.mark.sampled(0.3, pool="long"),
]

EXECUTORS: Final = "local-cluster[2,1,900]"
ASK: Final = """
import json, sys, time
from stormproof.core.base.clock import SystemClock
from stormproof.core.engine.executors import ask_executors
from stormproof.core.engine.spark import spark_session
from stormproof.core.base.errors import StormproofError
from stormproof.core.postgres.database import Database
from stormproof.core.start.preflight import DatabaseProbe, FolderProbe, PackageProbe, marked_places, package_fingerprint
from stormproof.core.start.settings import Settings

pythons, address, folder = json.loads(sys.argv[1]), sys.argv[2], sys.argv[3]
session = spark_session(Settings(master=%r, spark={"spark.executor.memory": "800m"}))
closed = Database.from_url("postgresql://nobody@127.0.0.1:1/none")

def asked(python, *probes):
    session.sparkContext.pythonExec = python
    began = time.monotonic()
    try:
        found = ask_executors(session, probes, SystemClock(), start_s=90, answer_s=90)
    except StormproofError as error:
        return {"error": [error.kind, error.message, dict(error.details)], "s": time.monotonic() - began}
    return {
        "known": found.known, "s": time.monotonic() - began,
        "answers": [[a.host, [[f.kind, f.message] for f in a.faults]] for a in found.answers],
    }

with marked_places([("the staging folder", folder)]) as shared:
    package, database = PackageProbe(package_fingerprint()), DatabaseProbe("the database", Database.from_url(address))
    told = {"well": asked(sys.executable, package, *shared, database)}
    told["faults"] = asked(
        sys.executable,
        PackageProbe("0" * 64),
        FolderProbe("the staging folder", "/sys", "kernel"),
        FolderProbe("the other folder", folder, "no-such-marker"),
        DatabaseProbe("the database", closed),
    )
    told |= {name: asked(python) for name, python in pythons.items()}
session.stop()
print(json.dumps(told))
"""


def bare_python(folder: Path, program: str = sys.executable) -> str:
    """A Python without a package."""
    subprocess.run([program, "-m", "venv", "--without-pip", str(folder)], check=True, capture_output=True, timeout=120)
    return str(folder / "bin" / "python")


def other_python() -> str | None:
    """A Python of another minor version, if there is one here."""
    for minor in (12, 13, 14, 10):
        program = shutil.which(f"python3.{minor}")
        if program is not None and minor != sys.version_info.minor:
            found = subprocess.run([program, "-c", "pass"], capture_output=True, check=False, timeout=60)
            if found.returncode == 0:
                return program
    return None


def test_what_an_executor_lacks_is_named_with_its_host(database: Database, tmp_path: Path) -> None:
    prepared_database(database)
    pythons = {"bare": bare_python(tmp_path / "bare"), "none": "/nowhere/python"}
    if (other := other_python()) is not None:
        pythons["other"] = other
    command = [sys.executable, "-c", ASK % EXECUTORS, json.dumps(pythons), database.adbc_uri, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=360, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    told: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    well = told.pop("well")  # the control
    assert (well["known"], [faults for _, faults in well["answers"]]) == (2, [[], []])
    for host, faults in told.pop("faults")["answers"]:
        kinds, texts = zip(*faults, strict=True)
        assert kinds == ("machine_unfit", "machine_unfit", "machine_unfit", "store_unavailable")
        assert "another version of the package" in texts[0]
        assert "the staging folder (/sys)" in texts[1]
        assert "is not the driver's folder" in texts[2]
        assert f"the database is not reached from {host}" in texts[3]
    for _, ((kind, text),) in told.pop("bare")["answers"]:
        assert (kind, "stormproof" in text, pythons["bare"] in text) == ("machine_unfit", True, True)
    kind, text, details = told.pop("none")["error"]
    assert (kind, "/nowhere/python" in text, bool(details["host"])) == ("machine_unfit", True, True)
    if other is not None:
        kind, text, details = told.pop("other")["error"]
        assert (kind, "different version" in text, bool(details["host"])) == ("machine_unfit", True, True)
    assert told == {}


def test_a_run_on_executors_without_the_package_opens_no_message(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepared_database(database)
    put(database, "words", [b"a b", b"c"])
    text = (
        "from stormproof import PostgresQueue, PostgresSink, Topology\n"
        "def topology():\n"
        "    t = Topology('words')\n"
        "    lines = t.stream('lines', PostgresQueue('words', max_attempts=1))\n"
        "    lines.map(str, 'line', schema='word string').into(PostgresSink('words'))\n"
        "    return t\n"
    )
    command = command_line_in(tmp_path, database, "words.py", text, monkeypatch, capsys)
    run = [sys.executable, "-m", "stormproof", "run", "words.py:topology", "--until-idle", "--json"]
    conf = ["--conf", "spark.executor.memory=800m", "--conf", f"spark.pyspark.python={bare_python(tmp_path / 'bare')}"]
    environment = os.environ | {"STORMPROOF_MASTER": EXECUTORS}
    done = subprocess.run([*run, *conf], capture_output=True, text=True, timeout=300, check=False, env=environment)
    assert done.returncode == 1, done.stderr[-4000:]
    error = json.loads(done.stdout)["error"]
    assert (error["kind"], error["details"]["error"]) == ("machine_unfit", "import")
    assert "stormproof" in error["details"]["modules"]
    stats = command("queue", "list", "words")
    assert stats["messages_put"] == 2
    assert command("dead-letters", "list")["dead_letters"] == []
