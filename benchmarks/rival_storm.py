"""Apache Storm and Trident beside us: a Java project that Maven compiles at the first use, run in a process of its own."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

import pyarrow as pa

from benchmarks.corpus import WORDS_IN_SENTENCE
from benchmarks.line_process import LineProcess, line_process
from benchmarks.workbench import Workbench, require_total
from stormproof.core.base.arrow import pc
from stormproof.core.postgres.database import Database

ROOT: Final = Path(__file__).parents[1]
PROJECT: Final = ROOT / "benchmarks" / "storm"
BUILT: Final = ROOT / ".brokers" / "storm"
"""Its classes, and the jars that Maven copies."""

BUILD_S, START_S, RUN_S, ANSWER_S = 480, 120, 120, 180
SETTLING_RUNS: Final = 3
"""The first takes ten times as long: the topology starts, and nothing is compiled to machine code yet."""
BATCH: Final = 10_000
"""Sentences in a batch of Trident's."""
JAVA: Final = ("java", "-Xms1g", "-Xmx2g", "-XX:+UseParallelGC")

Kind = Literal["core", "trident-counts", "trident-rows"]

TABLES: Final[dict[Kind, str]] = {
    "trident-counts": "(word text primary key, txid bigint, before bigint, n bigint)",
    "trident-rows": "(word text)",
}


def missing() -> str | None:
    """What is not there, or could not be built."""
    for command, name in (("mvn", "Maven"), ("javac", "a JDK"), ("java", "a JDK")):
        if shutil.which(command) is None:
            return f"{name} ({command})"
    return _build()


def _build() -> str | None:
    """Have Maven compile the project and copy the jars, where that was not done with these sources; why it could not."""
    digest = hashlib.sha256()
    for path in sorted(path for path in PROJECT.rglob("*") if path.is_file()):
        digest.update(path.read_bytes())
    done = BUILT / ".done"
    if done.exists() and done.read_text(encoding="ascii") == digest.hexdigest():
        return None
    shutil.rmtree(BUILT, ignore_errors=True)
    command = ["mvn", "-q", "-B", "-f", str(PROJECT / "pom.xml"), f"-Dstormproof.build={BUILT}", "compile"]
    command += ["dependency:copy-dependencies", f"-DoutputDirectory={BUILT / 'jars'}"]
    try:
        made = subprocess.run(command, check=False, timeout=BUILD_S, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        return f"Apache Storm (Maven was not done after {BUILD_S} s: {' '.join(command)})"
    if made.returncode != 0:
        return f"Apache Storm (Maven: {made.stdout.strip() or made.stderr.strip()})"
    done.write_text(digest.hexdigest(), encoding="ascii")
    return None


class Rival:
    """A settled topology. Every run has the same sentences, and what it made of them is compared with what is in them."""

    def __init__(self, bench: Workbench, process: LineProcess, kind: Kind, table: str, lines: pa.Array) -> None:
        self._bench = bench
        self._process = process
        self._kind = kind
        self._table = table
        words = pc.value_counts(pc.split_pattern(lines, " ").flatten())
        self._words = len(lines) * WORDS_IN_SENTENCE
        self._of_a_run = dict(zip(words.field(0).to_pylist(), words.field(1).to_pylist(), strict=True))
        self._runs = 0

    def words_a_second(self) -> float:
        """One run: from its first sentence to the last acknowledgement. Rows are written into an empty table."""
        if self._kind == "trident-rows":
            with self._bench.connect() as connection:
                connection.execute(f"truncate {self._table}".encode())
            self._runs = 0
        self._process.resume()
        seconds = float(self._process.ask(f"run {RUN_S}", ANSWER_S))
        self._process.pause()  # while it waits, its threads ask a thousand times a second whether there is work
        self._runs += 1
        return self._words / seconds

    def require_answer(self) -> None:
        """Every word was counted, or written, as often as it was emitted."""
        found = self._in_memory() if self._kind == "core" else self._in_postgres()
        wanted = {word: count * self._runs for word, count in self._of_a_run.items()}
        require_total(sum(found.values()), sum(wanted.values()), f"what {self._kind} counted")
        if found != wanted:
            raise RuntimeError(f"{self._kind} counted as many words as there are, but other ones")

    def _in_memory(self) -> dict[str, int]:
        path = self._bench.path("counts")
        self._process.resume()
        self._process.ask(f"counts {path}", ANSWER_S)
        rows = (line.split("\t") for line in path.read_text(encoding="utf-8").splitlines())
        return {word: int(count) for word, count in rows}

    def _in_postgres(self) -> dict[str, int]:
        count = "n" if self._kind == "trident-counts" else "count(*)"
        query = f"select word, {count} from {self._table}" + ("" if count == "n" else " group by word")
        with self._bench.connect() as connection:
            return dict(connection.execute(query.encode()).fetchall())


@contextmanager
def storm(bench: Workbench, kind: Kind, lines: pa.Array) -> Generator[Rival]:
    """Storm's embedded cluster with one topology, warmed up; its answer is compared when the measurement is over."""
    folder, table = bench.path("storm"), bench.unused("words_of_storm")
    folder.mkdir()
    text = folder / "sentences"
    text.write_text("".join(f"{line}\n" for line in lines.to_pylist()), encoding="utf-8")
    arguments = [str(folder), str(text), kind, str(BATCH), "1"]
    if kind != "core":
        with bench.connect() as connection:
            connection.execute(f"create table {table} {TABLES[kind]}".encode())
        arguments += [jdbc_url(bench.database), table]
    command = [*JAVA, "-cp", f"{BUILT}/classes:{BUILT}/jars/*", "stormproof.storm.Main", *arguments]
    with line_process(command, folder / "log", start_s=START_S) as process:
        rival = Rival(bench, process, kind, table, lines)
        for _ in range(SETTLING_RUNS):
            rival.words_a_second()
        yield rival
        rival.require_answer()


def jdbc_url(database: Database) -> str:
    """The embedded Postgres for JDBC: by its Unix domain socket, as for everybody else."""
    known = dict(database.parameters)
    socket = f"{known['host']}/.s.PGSQL.{known['port']}"
    by_socket = f"socketFactory=org.newsclub.net.unix.AFUNIXSocketFactory$FactoryArg&socketFactoryArg={socket}"
    # Without the last one, storm-jdbc sends a statement for each row.
    return f"jdbc:postgresql://localhost/{known['dbname']}?user={known['user']}&{by_socket}&reWriteBatchedInserts=true"
