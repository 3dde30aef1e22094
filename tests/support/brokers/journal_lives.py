"""Drivers of one topology that die one after the other, over a real server; into Postgres and Delta at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from stormproof import DeltaSink, PostgresSink, Topology
from stormproof.core.base.failpoint import watched
from stormproof.core.contract.payload import payload_in
from stormproof.core.pending.journal import JournalCounts
from stormproof.core.postgres.database import Database, connect
from stormproof.core.start.settings import Settings
from support.brokers import until
from support.brokers.harness import CrashHarness
from support.brokers.lives import SOON, Killed, checked
from support.contents import in_delta
from support.verdicts import verified

TOPOLOGY: Final = "lives"
SETTLED_S: Final = 40.0


@dataclass
class Lives:
    """A topology, what was put into its source, and the drivers that it had."""

    harness: CrashHarness
    database: Database
    folder: Path
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    produced: Counter[str] = field(default_factory=Counter[str])
    settings: dict[str, Any] = field(default_factory=dict[str, Any])

    def put(self, messages: int, *bad: str) -> None:
        """New words, each once; and messages that fail."""
        first = sum(self.produced.values())
        words = [f"word {first + n}" for n in range(messages)]
        self.produced.update(words)
        self.harness.put([word.encode() for word in [*words, *bad]])

    def topology(self, **options: Any) -> Topology:
        given = {"max_attempts": 2, **SOON, **self.options, **options}
        topology = Topology(TOPOLOGY)
        lines = topology.stream("lines", self.harness.unsubscribed(**given))
        words = lines.flat_map(checked, "line", schema="word string")
        words.into(PostgresSink("applied", database=self.database))
        words.into(DeltaSink(self.folder / "applied"))
        return topology

    def live(
        self, reached: Callable[[str], None] = lambda name: None, guarantee: str = "exactly-once", **options: Any
    ) -> bool:
        """One driver, until it has nothing to do or dies; says whether it lived."""
        settings = Settings(
            **{
                "database_url": self.database.adbc_uri,
                "staging_dir": str(self.folder),
                "batch_messages": 5,
                "poll_interval_s": 0.001,
                **self.settings,
            }
        )
        try:
            with watched(reached), suppress(Killed):
                self.topology(**options).run(guarantee, engine="inline", until_idle=True, settings=settings)
                return True
            return False
        finally:
            self.harness.died()

    def settle(self, guarantee: str = "exactly-once", **options: Any) -> None:
        """Drivers that nobody kills, until the server has no message left for this topology."""

        def settled() -> bool:
            self.live(guarantee=guarantee, **options)
            return self.harness.left() == 0

        until(settled, "the server still has messages", SETTLED_S)

    # ---- what there is

    def in_postgres(self) -> Counter[str]:
        with connect(self.database, application_name="tests") as connection:
            found = connection.execute("select word, count(*) from applied group by word").fetchall()
        return Counter(dict(found))

    def in_delta(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        for word, n in in_delta(self.folder / "applied", None):
            counts[word] += n
        return counts

    def dead(self) -> list[str]:
        with connect(self.database, application_name="tests") as connection:
            found = connection.execute("select payload from stormproof.dead_letter").fetchall()
        return sorted(payload_in(bytes(stored)).decode() for (stored,) in found)

    def journal(self) -> JournalCounts:
        with connect(self.database, application_name="tests") as connection:
            found = connection.execute(
                "select count(*), count(*) filter (where owed), coalesce(sum(suppressed), 0)::bigint,"
                " count(*) filter (where resolved_at is null)"
                " from stormproof.pending_message"
            ).fetchone()
        assert found is not None
        return JournalCounts(*found)

    def require_exactly_once(self) -> None:
        """Both tables hold what was produced, once, and the audit agrees."""
        assert self.in_postgres() == self.produced
        assert self.in_delta() == self.produced
        report = verified(TOPOLOGY, self.database)
        assert report.clean, report
