"""A topology from a broker into Postgres and Delta, whose drivers die one after the other; and what its tables must hold."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from stormproof import DeltaSink, PostgresSink, Topology
from stormproof.core.base.failpoint import watched
from stormproof.core.contract.payload import payload_in
from stormproof.core.postgres.database import Database, connect
from stormproof.core.start.settings import Settings
from support.contents import in_delta, in_postgres
from support.verdicts import verified

DRIVERS_MAX = 60
SOON = {"backoff_base_s": 0.001, "backoff_max_s": 0.001}


class Killed(BaseException):
    """The driver's end: its connections are cut before anything can be said over them."""


def checked(line: str) -> list[str]:
    if line.startswith("bad"):
        raise ValueError(line)
    return [line]


def kill_at(point: str, time: int = 1) -> Callable[[str], None]:
    """Ends a driver when it comes to a failpoint for the n-th time."""
    left = time

    def reached(name: str) -> None:
        nonlocal left
        left -= name == point
        if left == 0:
            left = -1
            raise Killed

    return reached


def kill_after(steps: int) -> Callable[[str], None]:
    """Ends a driver after so many failpoints of any name."""
    left = steps

    def reached(name: str) -> None:
        nonlocal left
        del name
        left -= 1
        if left == 0:
            raise Killed

    return reached


@dataclass
class Life:
    """One topology. `source` makes a driver's source; `cut` cuts a run's connections to the broker, as a kill does."""

    name: str
    database: Database
    folder: Path
    source: Callable[[], Any]
    cut: Callable[[Any], None]
    guarantee: str = "exactly-once"
    sinks: Sequence[str] = ("postgres", "delta")
    batch_messages: int = 5
    reached: Counter[str] = field(default_factory=Counter[str])

    @property
    def delta_path(self) -> Path:
        return self.folder / "lake" / self.name

    def drive(self, watcher: Callable[[str], None] | None = None) -> bool:
        """One driver, until nothing is left or it is killed; whether it came to the end."""
        ended = self._drive(watcher)
        if not ended:
            with warnings.catch_warnings():  # a process that is killed closes nothing, either
                warnings.simplefilter("ignore", ResourceWarning)
                gc.collect()
        return ended

    def _drive(self, watcher: Callable[[str], None] | None) -> bool:
        source = self.source()
        views: list[Any] = []
        for_run = source.for_run

        def followed(database: Database) -> Any:
            views.append(for_run(database))
            return views[-1]

        source.for_run = followed

        def watch(name: str) -> None:
            self.reached[name] += 1
            try:
                if watcher is not None:
                    watcher(name)
            except Killed:
                for view in views:
                    self.cut(view)
                raise

        topology = Topology(self.name)
        words = topology.stream("lines", source).flat_map(checked, "line", schema="word string")
        if "postgres" in self.sinks:
            words.into(PostgresSink(self.name, database=self.database))
        if "delta" in self.sinks:
            words.into(DeltaSink(self.delta_path, name="lake"))
        settings = Settings(
            database_url=self.database.adbc_uri,
            staging_dir=str(self.folder / "staging"),
            batch_messages=self.batch_messages,
            poll_interval_s=0.001,
        )
        with watched(watch), suppress(Killed):
            topology.run(self.guarantee, engine="inline", until_idle=True, settings=settings)
            return True
        return False

    def live(self, watchers: Iterable[Callable[[str], None]]) -> None:
        """Drivers that are killed, then one that is not, and one more for what came again at its end."""
        for watcher in watchers:
            self.drive(watcher)
        assert self.drive()
        assert self.drive()

    def applied(self) -> dict[str, Counter[str]]:
        """What each table holds."""
        found = dict[str, Counter[str]]()
        if "postgres" in self.sinks:
            found["postgres"] = Counter(word for word, _ in in_postgres(self.database, self.name, "1"))
        if "delta" in self.sinks:
            found["delta"] = Counter(word for word, _ in in_delta(self.delta_path, None))
        return found

    def dead(self) -> list[bytes]:
        """The payloads of dead letters."""
        with connect(self.database, application_name="tests") as connection:
            rows = connection.execute(
                "select payload from stormproof.dead_letter where source = %s", (self.name,)
            ).fetchall()
        return sorted(payload_in(bytes(stored)) for (stored,) in rows)

    def require(self, expected: Iterable[str]) -> None:
        """Each table holds exactly this, and the audit agrees."""
        wanted = Counter(expected)
        for sink, found in self.applied().items():
            assert found == wanted, f"{sink}: lost {wanted - found}, doubled {found - wanted}"
        report = verified(self.name, self.database)
        assert report.clean, report

    def random_kills(self, rng: Random, drivers: int = 6) -> list[Callable[[str], None]]:
        """Ends of drivers, at any place."""
        return [kill_after(rng.randrange(20, 200)) for _ in range(drivers)]
