"""A driver, as a process of its own, whose function may take it down.

``python poison_driver.py CASE`` with the case as JSON; without Spark it is forked from a process that has all loaded.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final, Literal, cast

import sqlalchemy as sa

from stormproof import PostgresQueue, PostgresSink, Topology, count
from stormproof.core.base.failpoint import ENV_DRIVER_PID
from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database, connect
from stormproof.core.start.settings import Settings
from stormproof.trident.driver.run import driver, options_of
from stormproof.trident.ledger import tables as t
from stormproof.trident.terms.transaction_states import EventKind
from support.crashes import child_of, ended
from support.poison import Poisoning, Split

BATCH: Final = 16
TIMEOUT_S: Final = 120
QUEUE: Final = "lines"
TABLE: Final = "counts"


@dataclass(frozen=True, slots=True)
class Case:
    """One poisoned queue. `notes` off: tasks say nothing, as if there were no heartbeat."""

    folder: Path
    database: Database
    poisoning: Poisoning
    engine: Literal["inline", "spark"]
    notes: bool = True

    @property
    def pids(self) -> Path:
        """Where the poison took hold."""
        return self.folder / "pids"


def run_poisoned(case: Case) -> int:
    """Run one driver to its end: its exit status, or the negative number of the signal that killed it."""
    if case.engine == "inline":
        return ended(child_of(drive, (case,)), "a poisoned topology", TIMEOUT_S)
    url = case.database.sqlalchemy_url.render_as_string(hide_password=False)
    fields = {**asdict(case), "folder": str(case.folder), "database": url}
    environment = {k: v for k, v in os.environ.items() if k != ENV_DRIVER_PID}
    environment["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, __file__, json.dumps(fields)]
    # In a process group of its own: Spark's JVM follows its driver within seconds of the driver's death.
    return subprocess.run(command, env=environment, timeout=TIMEOUT_S, start_new_session=True, check=False).returncode


def applied(case: Case) -> Counter[str]:
    """What the sink holds."""
    with connect(case.database, application_name="tests") as connection:
        return Counter(dict(connection.execute(f"select word, n from {TABLE}".encode()).fetchall()))


def blamed(case: Case) -> tuple[list[tuple[str, str]], Counter[str]]:
    """The failures in the ledger, as (reason, input), and how many events it has of every kind that names a message."""
    engine = sa.create_engine(case.database.sqlalchemy_url)
    query = sa.select(t.event.c.kind, t.event.c.reason, t.event.c.input).where(t.event.c.message.is_not(None))
    with engine.connect() as connection:
        rows = connection.execute(query).all()
    engine.dispose()
    failures = [(row.reason, row.input) for row in rows if row.kind == EventKind.FAILURE.value]
    return failures, Counter(row.kind for row in rows)


def drive(case: Case) -> None:
    """Run until the queue is idle."""
    for name in [k for k in os.environ if k.startswith(("STORMPROOF_", "PG"))]:
        del os.environ[name]
    logging.getLogger("stormproof").setLevel(logging.CRITICAL)
    settings = Settings(
        database_url=case.database.sqlalchemy_url.render_as_string(hide_password=False),
        home=case.folder / "home",
        batch_messages=BATCH,
        master="local[2,4]",
    )
    topology = Topology("poisoned")
    source = PostgresQueue(QUEUE, schema="line string", database=case.database, max_attempts=1)
    words = topology.stream("lines", source).flat_map(Split(case.poisoning, case.pids), "line", schema="word string")
    words.group_by("word").persistent_aggregate(n=count()).into(PostgresSink(TABLE, database=case.database))
    options = options_of(settings, Guarantee.EXACTLY_ONCE)
    if not case.notes:
        options = replace(options, heartbeat_root=None)
    with driver(topology, settings=settings, engine=case.engine, options=options, until_idle=True) as coordinator:
        coordinator.run()


def main() -> None:
    fields = json.loads(sys.argv[1])
    drive(
        Case(
            folder=Path(fields["folder"]),
            database=Database.from_url(fields["database"]),
            poisoning=Poisoning(fields["poisoning"]),
            engine=cast("Literal['inline', 'spark']", fields["engine"]),
            notes=fields["notes"],
        )
    )


if __name__ == "__main__":
    main()
