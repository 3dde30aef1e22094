"""A topology over a real queue and real sinks, run in this process, and the command line beside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from stormproof import Topology
from stormproof.core.postgres.database import connect
from stormproof.core.start.settings import Settings
from stormproof.trident.driver.coordinator import Coordinator
from stormproof.trident.driver.run import driver
from stormproof.trident.terms.observers import BatchResult, RunStatistics
from support.command_line import CommandLine
from support.crashes import Cell
from support.queues import put
from support.topologies import topology


@dataclass(frozen=True, slots=True)
class Operated:
    """A cell's topology, and what an operator can do to it."""

    cell: Cell
    capture: pytest.CaptureFixture[str]

    def run(
        self,
        built: Topology | None = None,
        *,
        on_batch: Callable[[BatchResult], None] | None = None,
        on_ready: Callable[[Coordinator], None] | None = None,
        outage_s: float = 60.0,
        rejects_max_share: float | None = None,
    ) -> RunStatistics:
        """Run it (or another topology in its place) until its queue is idle. What is None is as the environment says."""
        cell = self.cell
        given = {} if rejects_max_share is None else {"rejects_max_share": rejects_max_share}
        settings = Settings(
            database_url=cell.database.sqlalchemy_url.render_as_string(hide_password=False),
            home=cell.folder / "home",
            batch_messages=cell.batch_messages,
            outage_s=outage_s,
            **given,
        )
        if built is None:
            built = topology(cell.name, cell.mode, cell.folder, cell.database, cell.queue)
        with driver(
            built,
            cell.guarantee,
            settings=settings,
            engine="inline",
            until_idle=True,
            rng=random.Random(1),
            on_batch=on_batch,
            on_ready=on_ready,
        ) as coordinator:
            return coordinator.run()

    def put(self, *payloads: bytes) -> None:
        put(self.cell.database, self.cell.queue, payloads)

    def sql(self, statement: str) -> list[tuple[Any, ...]]:
        """Behind everybody's back."""
        with connect(self.cell.database, application_name="tests", autocommit=True) as connection:
            cursor = connection.execute(statement.encode())
            return [] if cursor.description is None else cursor.fetchall()

    def command(self, *arguments: str, status: int = 0) -> Any:
        """A command with `--json`, which must end with this exit status; what it printed."""
        return CommandLine(self.capture)(*arguments, status=status)

    def text(self, *arguments: str, status: int = 0) -> str:
        """A command for people; what it printed."""
        return CommandLine(self.capture).text(*arguments, status=status)

    def verify(self, status: int = 0) -> dict[str, Any]:
        """`audit verify`, with its exit status."""
        report: dict[str, Any] = self.command("audit", "verify", self.cell.name, status=status)
        return report

    def kinds(self, what: str, report: dict[str, Any]) -> Sequence[str]:
        """The kinds of a report's violations or notices."""
        return [found["kind"] for found in report[what]]
