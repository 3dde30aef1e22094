"""Spark's executors as processes of their own, and a program that `spark-submit` starts: exactly once, whoever dies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import psutil
import pyspark
import pytest
from deltalake import DeltaTable
from support.brokers.object_store import ObjectStore
from support.command_line import CommandLine, command_line_in
from support.queues import prepared_database, put

from stormproof.core.postgres.database import Database, connect
from stormproof.core.storage.protocol import default_storage

pytestmark = [pytest.mark.spark, pytest.mark.postgres, pytest.mark.timeout(300)]

EXECUTORS: Final = "local-cluster[2,1,900]"
"""Two executors of one core each, as processes of this machine, started by a master as of a standalone cluster."""

FILE: Final = """
import os
from pathlib import Path
from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology, count

ONCE = Path({folder!r}) / "died"

def split(line: str) -> list[str]:
    if line.startswith("fatal") and {dies}:
        try:
            ONCE.touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            import psutil, signal
            jvm = next(p for p in psutil.Process().parents() if p.name() == "java")
            os.kill(jvm.pid, signal.SIGKILL)
    return line.split()

def topology() -> Topology:
    t = Topology("words")
    words = t.stream("lines", PostgresQueue("words")).flat_map(split, "line", schema="word string")
    words.group_by("word").persistent_aggregate(n=count()).into(PostgresSink("counts"))
    return t

def in_store() -> Topology:
    t, lake = Topology("words"), {lake!r}
    words = t.stream("lines", PostgresQueue("words")).flat_map(split, "line", schema="word string")
    words.into(DeltaSink(lake + "/words"))
    words.group_by("word").persistent_aggregate(n=count()).into(DeltaSink(lake + "/counts"))
    return t
"""
LINES: Final = [*(f"a b m{number}" for number in range(40)), "fatal a"]


def counts(database: Database) -> Counter[str]:
    with connect(database, application_name="tests", autocommit=True) as connection:
        return Counter(dict(connection.execute("select word, n from counts").fetchall()))


@pytest.fixture
def words(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., CommandLine]:
    """A topology with lines to count, one of which kills its executor once where that is asked for."""
    prepared_database(database)
    put(database, "words", [line.encode() for line in LINES])

    def made(dies: bool, lake: str = "") -> CommandLine:
        text = FILE.format(folder=str(tmp_path), dies=dies, lake=lake)
        return command_line_in(tmp_path, database, "words.py", text, monkeypatch, capsys)

    return made


def ended(command: list[str], **more: str) -> tuple[Any, str]:
    """What a program printed on standard output, as JSON, and what on standard error; it must end with 0."""
    done = subprocess.run(command, env={**os.environ, **more}, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout), done.stderr


@pytest.mark.sampled(0.3, pool="long")
def test_an_executor_that_dies_costs_no_message_and_blames_none(
    words: Callable[..., CommandLine], database: Database
) -> None:
    command = words(True)
    run = [sys.executable, "-m", "stormproof", "run", "words.py:topology", "--until-idle", "--json"]
    conf = ["--conf", "spark.executor.memory=800m", "--conf", "spark.python.worker.reuse=true"]
    report, _ = ended([*run, *conf], STORMPROOF_MASTER=EXECUTORS)
    assert Path("died").exists()
    assert counts(database) == Counter(word for line in LINES for word in line.split())
    assert (report["messages"], report["failed"], report["dead_letters"]) == (len(LINES), 0, 0)
    assert command("audit", "verify", "words")["violations"] == []
    ours = {process.pid for process in psutil.Process().children(recursive=True)}
    assert not [
        found.pid
        for found in psutil.process_iter(["name", "cmdline"])  # passes over those that end meanwhile
        if found.pid in ours and found.info["name"] == "java" and "Executor" in str(found.info["cmdline"])
    ]


@pytest.mark.sampled(0.3, pool="long")
def test_tables_in_an_object_store_outlive_an_executor_that_dies(
    words: Callable[..., CommandLine], object_store: ObjectStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The executors put their files where the driver finds them; the options come from the driver's setting."""
    lake = f"{object_store.url}/{uuid.uuid4().hex}"
    monkeypatch.setenv("STORMPROOF_STORAGE_OPTIONS", json.dumps(object_store.options()))
    command = words(True, lake)
    run = [sys.executable, "-m", "stormproof", "run", "words.py:in_store", "--until-idle", "--json"]
    report, told = ended([*run, "--conf", "spark.executor.memory=800m"], STORMPROOF_MASTER=EXECUTORS)
    assert Path("died").exists()
    should = Counter(word for line in LINES for word in line.split())
    made = {
        name: DeltaTable(f"{lake}/{name}", storage_options=object_store.options()).to_pyarrow_table().to_pylist()
        for name in ("words", "counts")
    }
    assert Counter(row["word"] for row in made["words"]) == should
    assert Counter({row["word"]: row["n"] for row in made["counts"]}) == should
    assert (report["messages"], report["failed"], report["dead_letters"]) == (len(LINES), 0, 0)
    assert object_store.SECRET not in told
    default_storage(object_store.options)  # as a new process reads the setting
    assert command("audit", "verify", "words")["violations"] == []


SHOWS: Final = """
import json, urllib.request
from pathlib import Path
import psutil
from stormproof.core.engine.spark import spark_session
from stormproof.core.start.settings import Settings
secrets = {
    "spark.hadoop.fs.s3a.secret.key": "hush",
    "spark.hadoop.fs.azure.account.key.shop.dfs.core.windows.net": "hush",
    "spark.hadoop.fs.azure.sas.orders.shop.blob.core.windows.net": "hush",
    "spark.executorEnv.STORMPROOF_DATABASE_URL": "postgresql://shop:hush@db/shop",
    "spark.executorEnv.BROKER": "nats://hush@broker:4222",
    "spark.mine.blob": "https://shop.blob.core.windows.net/orders?sig=hush",
    "spark.mine.hidden": "hush",
}
others = {"spark.mine": "shown", "spark.redaction.regex": "hidden", "spark.ui.enabled": "true", "spark.ui.port": "0"}
session = spark_session(Settings(master="local[1]", spark=secrets | others))
context = session.sparkContext
conf = context.getConf()
def line(process):
    try:
        return Path(f"/proc/{process.pid}/cmdline").read_text() if Path("/proc").exists() else " ".join(process.cmdline())
    except (FileNotFoundError, ProcessLookupError, psutil.NoSuchProcess):  # it has ended meanwhile
        return ""
lines = [line(process) for process in psutil.Process().children(recursive=True)]
page = f"{context.uiWebUrl}/api/v1/applications/{context.applicationId}/environment"
with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(page, timeout=60) as answer:
    environment = answer.read().decode()
print(json.dumps({
    "known": [conf.get(name) == value for name, value in secrets.items()],
    "hadoop": context._jsc.hadoopConfiguration().get("fs.s3a.secret.key"),
    "command lines": [any(word in line for line in lines) for word in ("hush", "spark.mine=shown")],
    "page": [word in environment for word in ("hush", '"shown"')],
}))
session.stop()
"""


def test_a_secret_among_sparks_settings_is_on_no_command_line_and_not_in_its_page() -> None:
    shown, _ = ended([sys.executable, "-c", SHOWS])
    assert shown == {"known": [True] * 7, "hadoop": "hush", "command lines": [False, True], "page": [False, True]}


def test_a_platforms_spark_submit_gives_its_settings(
    words: Callable[..., CommandLine], database: Database, tmp_path: Path
) -> None:
    command = words(False)
    (tmp_path / "job.py").write_text(
        "import json, pyspark\n"
        "from pyspark.sql import SparkSession\n"
        "from words import topology\n"
        "statistics = topology().run(until_idle=True)\n"
        "conf = SparkSession.getActiveSession().sparkContext.getConf()\n"
        "print(json.dumps([statistics.messages, conf.get('spark.master'), conf.get('spark.app.name'),\n"
        "  conf.get('spark.ui.enabled'), pyspark.__file__]))\n"
    )
    home = tmp_path / "spark"  # not where Python's packages are installed
    home.symlink_to(Path(pyspark.__file__).parent)
    asked = [
        "--master",
        "local[1]",
        "--name",
        "mine",
        "--conf",
        "spark.ui.enabled=false",
        "--conf",
        "spark.log.level=OFF",
    ]
    found = {"SPARK_HOME": str(home), "PYSPARK_PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    report, _ = ended([str(home / "bin/spark-submit"), *asked, "job.py"], **found)
    assert report[:4] == [len(LINES), "local[1]", "mine", "false"]
    assert str(report[4]).startswith(f"{home}/python/lib/pyspark.zip/")
    assert counts(database) == Counter(word for line in LINES for word in line.split())
    assert command("audit", "verify", "words")["violations"] == []
