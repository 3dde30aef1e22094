"""Words counted on a cluster: a topology whose tasks say where they run, its driver on a host, and what it should give."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from psycopg.rows import dict_row

from stormproof.core.postgres.database import Database
from support.brokers import until
from support.brokers.object_store import BUCKET
from support.cluster.hosts import DISK, Host
from support.cluster.spark_cluster import EXECUTOR_MB, VENV, WORKERS, Cluster
from support.databases import at
from support.queues import prepared_database, put

WAIT_S: Final = 600.0
TABLES: Final = ("append", "fold", "counts", "kept")
AT_WORK: Final = "at-work"
"""The folder on a worker's disk in which tasks say that they run."""

TOPOLOGY: Final = '''
import os, time
from stormproof import DeltaSink, PostgresMap, PostgresQueue, PostgresSink, Topology, count
from stormproof.state import StateSink

LAKE, DISK = {lake!r}, {disk!r}

def split(line):
    """After a pause the words of a line; its first words are how long, in seconds, and a name for that this task runs."""
    pause, name, *words = line.split()
    if float(pause):
        os.makedirs(DISK + "/at-work", exist_ok=True)
        with open(DISK + "/at-work/" + name, "a"):
            time.sleep(float(pause))
    return words

def topology():
    t = Topology("words", {guarantee!r})
    words = t.stream("lines", PostgresQueue("lines")).flat_map(split, "line", schema="word string")
    words.into(DeltaSink(LAKE + "/append", name="append"))
    words.group_by("word").persistent_aggregate(n=count()).into(
        DeltaSink(LAKE + "/fold", name="fold"), PostgresSink("counts"), StateSink("kept", PostgresMap("kept"))
    )
    return t
'''

SETTINGS: Final = """
master = "spark://master:7077"
database_url = "{database}"
staging_dir = "{lake}/staging"
small_job_ms = 0
parallelism = 2
start_timeout_s = 120
outage_s = 120
log_level = "info"
spark.driver.host = "{host}"
spark.driver.memory = "512m"
spark.executor.memory = "{memory}m"
spark.executor.extraJavaOptions = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
spark.submit.pyFiles = "{package}"
spark.pyspark.python = "{python}"
spark.sql.shuffle.partitions = "2"
spark.cores.max = "{cores}"

[storage_options]
{options}
"""

READS: Final = """
import json, os, sys
from deltalake import DeltaTable
lake, options, *names = sys.argv[1:]
options, found = json.loads(options), dict()
for name in names:
    where = lake + "/" + name
    found[name] = []
    if DeltaTable.is_deltatable(where, storage_options=options):
        found[name] = DeltaTable(where, storage_options=options).to_pyarrow_table().to_pylist()
print(json.dumps(found), flush=True)
os._exit(0)  # a thread of pyarrow that waits for Python at its end would abort the process
"""
"""By delta-rs alone."""


@dataclass(slots=True)
class Words:
    """One topology's life on a cluster. `sent` are the words of all messages that were put."""

    cluster: Cluster
    name: str
    sent: Counter[str] = field(default_factory=Counter[str])
    messages: int = 0

    @property
    def database(self) -> Database:
        """The ledger, the queue and a table, for this process."""
        return self.cluster.postgres.local(self.name)

    @property
    def lake(self) -> str:
        """Where the Delta tables and prepared files are."""
        return f"s3://{BUCKET}/{self.name}"

    @staticmethod
    def on(cluster: Cluster, program: str = TOPOLOGY, guarantee: str = "exactly-once", **more: str) -> Words:
        """A new one, with a database and a folder in the store of its own; every driver's host has its files."""
        made = Words(cluster, cluster.fresh_database())
        prepared_database(made.database)
        for host in cluster.drivers.values():
            made.install(host, program.format(lake=made.lake, disk=DISK, guarantee=guarantee), more)
        return made

    def install(self, host: Host, program: str, more: Mapping[str, str]) -> None:
        """Put a program, which makes the topology, and its settings on a host's disk."""
        options = "\n".join(f'{key} = "{value}"' for key, value in self.cluster.store.options().items())
        folder = host.folder / self.name
        folder.mkdir()
        (folder / "words.py").write_text(program)
        text = SETTINGS.format(
            database=self.cluster.postgres.address(self.name),
            lake=self.lake,
            host=host.address,
            memory=EXECUTOR_MB,
            cores=len(WORKERS),
            package=f"{DISK}/package.zip",
            python=f"{VENV}/bin/python",
            options=options,
        )
        replaced = {line.partition("=")[0].strip(): line for line in more.values()}
        lines = [replaced.pop(line.partition("=")[0].strip(), line) for line in text.splitlines()]
        (folder / "stormproof.toml").write_text("\n".join([*replaced.values(), *lines]))

    def put(self, lines: Sequence[Sequence[str]], *, pause_s: float = 0.0, tag: str = "-") -> None:
        """Put a message for each line; its task waits so long over it."""
        put(self.database, "lines", [" ".join([str(pause_s), tag, *words]).encode() for words in lines])
        self.sent.update(word for words in lines for word in words)
        self.messages += len(lines)

    # Drivers.

    def pack(self, host: Host) -> None:
        """Make the package's archive on a host, and bring it to all hosts that drive."""
        status, report, told = self.ended(host, "pack", "--output", f"{DISK}/package.zip")
        assert status == 0, told
        assert report["settings"] == {"spark.submit.pyFiles": f"{DISK}/package.zip"}
        for other in self.cluster.drivers.values():
            if other is not host:
                shutil.copyfile(host.folder / "package.zip", other.folder / "package.zip")

    def command(self, host: Host, *arguments: str, **environment: str) -> list[str]:
        """The command line, on a host that has the repository."""
        return self.python(host, "-m", "stormproof", *arguments, **environment)

    def python(self, host: Host, *arguments: str, **environment: str) -> list[str]:
        """Python there, in the folder of this topology."""
        given = {"PYTHONDONTWRITEBYTECODE": "1", "JAVA_HOME": str(self.cluster.java_home), **environment}
        program = ("sh", "-c", 'cd "$0" && exec "$@"', f"{DISK}/{self.name}", f"{VENV}/bin/python")
        return host.inside(*program, *arguments, environment=given)

    def ended(self, host: Host, *arguments: str, seconds: float = 300.0, **environment: str) -> tuple[int, Any, str]:
        """Run a command to its end: its status, what it printed as JSON, and what it said."""
        done = subprocess.run(
            self.command(host, *arguments, "--json", **environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds,
        )
        return done.returncode, json.loads(done.stdout) if done.stdout.strip() else None, done.stderr

    def start_driver(self, host: Host) -> subprocess.Popen[bytes]:
        """Start a driver that waits for messages until it is ended; what it says is on the host's disk, in `driver`."""
        with (host.folder / "driver").open("ab") as file:
            return subprocess.Popen(
                self.command(host, "run", "words.py:topology"),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def until_at_work(self, tag: str, driver: subprocess.Popen[bytes]) -> bool:
        """Wait until both workers have a task at messages of this name; False if all is committed without that."""

        def they_are() -> bool:
            assert driver.poll() is None, "the driver has ended"
            return self.at_work(tag) == list(WORKERS)

        until(lambda: they_are() or self.committed() == self.messages, f"no task works on {tag}", WAIT_S)
        return they_are() and self.committed() < self.messages

    def until_committed(self, driver: subprocess.Popen[bytes]) -> None:
        """Wait until every message that was put is committed."""

        def they_are() -> bool:
            assert driver.poll() is None, "the driver has ended"
            return self.committed() == self.messages

        until(they_are, "not all messages are committed", WAIT_S)

    def until_blamed(self, driver: subprocess.Popen[bytes]) -> None:
        """Wait until a message was blamed."""

        def one_was() -> bool:
            assert driver.poll() is None, "the driver has ended"
            return bool(self.blamed())

        until(one_was, "no message was blamed", WAIT_S)

    # What is there, as another host sees it.

    def tables(self, host: Host) -> dict[str, Counter[str]]:
        """How often each word stands in each table; a fold has each word once."""
        rows = self.delta_rows(host, "append", "fold") | self.postgres_rows("counts", "kept")
        found: dict[str, Counter[str]] = {}
        for name, some in rows.items():
            found[name] = Counter()
            for row in some:
                word = row["word"]
                assert name == "append" or word not in found[name], f"{word!r} stands in {name} twice"
                found[name][word] += row.get("n", 1)
        return found

    def delta_rows(self, host: Host, *names: str) -> dict[str, list[dict[str, Any]]]:
        """The rows of Delta tables, as a host reads them from the store."""
        options = json.dumps(self.cluster.store.options())
        done = host.run(f"{VENV}/bin/python", "-c", READS, self.lake, options, *names, seconds=180)
        assert done.returncode == 0, done.stderr
        found: dict[str, list[dict[str, Any]]] = json.loads(done.stdout)
        return found

    def postgres_rows(self, *names: str) -> dict[str, list[dict[str, Any]]]:
        """The rows of Postgres tables."""
        found: dict[str, list[dict[str, Any]]] = {}
        with at(self.database) as connection, connection.cursor(row_factory=dict_row) as cursor:
            for name in names:
                cursor.execute("select to_regclass(%s) is not null as is_there", (name,))
                is_there = cursor.fetchone() == {"is_there": True}
                found[name] = cursor.execute(f"select * from {name}".encode()).fetchall() if is_there else []
        return found

    def check(self, host: Host) -> None:
        """Every table has what was put, once, and no message was blamed; the audit says so on another host, too."""
        should = dict.fromkeys(TABLES, self.sent)
        assert self.tables(host) == should
        assert self.blamed() == []
        status, report, told = self.ended(host, "audit", "verify", "words")
        assert (status, report["violations"]) == (0, []), (report, told)

    def blamed(self) -> list[tuple[Any, ...]]:
        """Every event of the ledger that says of a message that it failed, or went back for a failure."""
        asks = "select kind, message, error from stormproof.event where kind in ('failure', 'returned', 'dead_letter')"
        with at(self.database) as connection:
            return connection.execute(asks.encode()).fetchall()

    def committed(self) -> int:
        """How many messages are in committed transactions."""
        asks = "select coalesce(sum(messages), 0) from stormproof.txn where state = 'committed'"
        with at(self.database) as connection:
            row = connection.execute(asks.encode()).fetchone()
        assert row is not None
        return int(row[0])

    def at_work(self, tag: str) -> list[str]:
        """The workers on which a task is, or was, at work on messages of this name."""
        hosts = self.cluster.workers
        return [name for name in WORKERS if (hosts[name].folder / AT_WORK / tag).exists()]


def lines_of(rng: random.Random, number: int, words: int = 40) -> list[list[str]]:
    """Random lines of some words."""
    return [[f"w{rng.randrange(words)}" for _ in range(rng.randrange(1, 6))] for _ in range(number)]
