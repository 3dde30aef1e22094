"""What a measurement runs on: a folder, a Postgres and a Spark session of its own."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import psycopg
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from benchmarks.corpus import Corpus, write_corpus
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Limit
from stormproof.core.engine.delta_jars import delta_jars
from stormproof.core.engine.protocol import Engine
from stormproof.core.engine.spark import SparkEngine, spark_session
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.postgres.database import Database, connect
from stormproof.core.start.settings import Settings
from stormproof.migrations import migrate
from stormproof.trident.driver.coordinator import Coordinator
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.driver.run import driver
from stormproof.trident.ledger.database import ledger_engine
from stormproof.trident.terms.observers import BatchResult

LIMIT_BYTES = 2**40


class Workbench:
    """Everything that is measured happens below one temporary folder, which is removed when the process ends.

    The user's own Postgres, settings and Spark are left alone: variables that name them are taken out first. `packages`
    are what Spark fetches from Maven for the rivals' sake, `jars` what it is given for them.
    """

    def __init__(self, packages: Sequence[str] = (), jars: Sequence[Path] = ()) -> None:
        self._packages = tuple(packages)
        self._jars = tuple(jars)
        for name in list(os.environ):
            if name.startswith(("STORMPROOF_", "PG")):
                del os.environ[name]
        self.folder = Path(tempfile.mkdtemp(prefix="stormproof-bench-"))
        # Before the database's own: what is registered last is called first, and the server must be down by then.
        atexit.register(shutil.rmtree, self.folder, ignore_errors=True)
        self.cores = len(os.sched_getaffinity(0))
        self.settings = Settings(
            home=self.folder / "home", master=f"local[{self.cores}]", parallelism=self.cores, embedded=True
        )
        self._made = 0
        self._corpora: dict[int, Corpus] = {}

    @cached_property
    def database(self) -> Database:
        """The embedded Postgres, with the ledger's schema: a rival's queue may be filled before a topology runs."""
        database = self.settings.resolve_database()
        engine = ledger_engine(database)
        try:
            migrate(engine)
        finally:
            engine.dispose()
        return database

    @cached_property
    def session(self) -> SparkSession:
        """The session that Stormproof runs on."""
        packages = {"spark__jars__packages": ",".join(self._packages)} if self._packages else {}
        jars = {}
        if self._jars:
            jars = {"spark__jars": ",".join(map(str, (*delta_jars(self.settings.delta_jars_dir), *self._jars)))}
        return spark_session(self.settings, spark__driver__memory="4g", **packages, **jars)

    @cached_property
    def rival_session(self) -> SparkSession:
        """A session for plain Spark in the same JVM, with what is best for it at this size.

        One shuffle task a core, no adaptive re-planning (slower here), Spark's usual number of rows in an Arrow batch.
        """
        session = self.session.newSession()
        session.conf.set("spark.sql.shuffle.partitions", str(self.cores))
        session.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "10000")
        session.conf.set("spark.sql.execution.arrow.pyspark.validateSchema.enabled", "false")
        return session

    @cached_property
    def engine(self) -> SparkEngine:
        """The Spark engine."""
        return SparkEngine(self.session, self.cores)

    def corpus(self, sentences: int) -> Corpus:
        """A text of so many sentences, made once."""
        if sentences not in self._corpora:
            self._corpora[sentences] = write_corpus(self.folder / f"text-{sentences}", sentences, self.cores)
        return self._corpora[sentences]

    def unused(self, what: str) -> str:
        """A name that nothing has yet."""
        self._made += 1
        return f"{what}_{self._made}"

    def path(self, what: str) -> Path:
        """A path that nothing has yet."""
        return self.folder / self.unused(what)

    def connect(self) -> psycopg.Connection:
        """A connection for a rival."""
        return connect(self.database, application_name="benchmarks", autocommit=True)

    @contextmanager
    def stepping(
        self, topology: TopologyGraph, guarantee: Guarantee, messages: int, *, engine: Engine | None = None
    ) -> Generator[Stepper]:
        """A started driver, to be taken on batch by batch."""
        options = RunOptions(guarantee=guarantee, limit=Limit(messages, LIMIT_BYTES), message_timeout_s=600.0)
        with driver(
            topology, guarantee, settings=self.settings, engine=engine or self.engine, options=options
        ) as coordinator:
            coordinator.recover(sweep=True)
            yield Stepper(coordinator, messages)

    def close(self) -> None:
        """Stop Spark, if it was started."""
        if "session" in self.__dict__:
            self.session.stop()


class Stepper:
    """Takes a topology on by one batch and says how long that took; a batch that is not whole is no measurement."""

    def __init__(self, coordinator: Coordinator, messages: int) -> None:
        self._coordinator = coordinator
        self._messages = messages
        self.batches = 0

    def step(self) -> BatchResult:
        """One batch."""
        result = self._coordinator.step()
        if result is None or result.state != "committed" or result.messages != self._messages or result.attempts != 1:
            raise RuntimeError(f"not a whole batch of {self._messages} messages at the first attempt: {result}")
        self.batches += 1
        return result

    def all_of(self) -> int:
        """Batches, until as many messages are committed as one is to have at most: for a source that cuts them smaller."""
        committed = 0
        while committed < self._messages:
            result = self._coordinator.step()
            if result is None or result.state != "committed" or result.attempts != 1:
                raise RuntimeError(f"not a whole batch at the first attempt: {result}")
            committed += result.messages
            self.batches += 1
        return committed

    def seconds(self) -> float:
        """One batch's time, from before it is opened to after it is committed."""
        started_s = time.perf_counter()
        self.step()
        return time.perf_counter() - started_s


def timed(action: Callable[[], object]) -> float:
    """How long a call took."""
    started_s = time.perf_counter()
    action()
    return time.perf_counter() - started_s


def require_total(found: int, wanted: int, what: str) -> None:
    """A fast wrong answer is no measurement."""
    if found != wanted:
        raise RuntimeError(f"{what} has {found} instead of {wanted}")


def delta_total(path: str | Path, column: str = "n", options: Mapping[str, str] | None = None) -> int:
    """The sum of a Delta table's column."""
    from stormproof.core.base.arrow import pc

    table = DeltaTable(str(path), storage_options=dict(options or {}))
    total = sum(
        pc.sum(values).as_py() or 0 for values in table.to_pyarrow_dataset().to_table(columns=[column]).itercolumns()
    )
    return int(total)
