"""A ledger with one of everything that the questions ask about, and what each answer must be by what was done.

Two lives of a topology, failed and replayed messages, a dead letter that was edited, one that was dropped, rejects, killed
drivers, an aborted batch, a skipped one, a blocked one, an adopted table, and verdicts of both kinds.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import pytest

from stormproof import DeltaSink, PostgresSink, Topology
from stormproof.core.base.errors import PositionMismatch, SinkRefused
from support.crashes import KILLED, Cell, run_driver
from support.operated import Operated
from support.queues import prepared_database
from support.topologies import source_of

NAME: Final = "walked"
BATCH: Final = 4
REJECTED: Final = "23514"
"""SQLSTATE of a violated check."""


class Number:
    """A line's number. ``bad`` is none; ``once N`` is none the first time, which a file remembers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, line: str) -> int:
        first, _, number = line.rpartition(" ")
        if first == "once" and not (mark := self._folder / f"tried-{number}").exists():
            mark.touch()
            raise KeyError("the first time")
        return int(number)


def build(cell: Cell) -> Topology:
    """Numbers into a table that takes none below zero, and into one that takes all."""
    t = Topology(NAME)
    numbers = t.stream("lines", source_of(cell.queue, cell.database)).map(Number(cell.folder), "line", schema="n int")
    numbers.into(
        PostgresSink("numbers", name="strict", database=cell.database, lineage=True),
        DeltaSink(cell.folder / "lake" / "numbers", name="lake", lineage=True),
    )
    return t


@dataclass
class Walk:
    """The history; `steps` has each step's name with the time at which it began."""

    run: Operated
    monkeypatch: pytest.MonkeyPatch
    steps: list[tuple[datetime, str]] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)
    """A line's message, as commands show it."""

    @contextmanager
    def step(self, name: str) -> Generator[None]:
        """What is on record of the block is of this step."""
        self.steps.append((datetime.now(UTC), name))
        yield
        self.steps.append((datetime.now(UTC), "between"))

    def step_at(self, at: datetime) -> str:
        """The step that was under way."""
        return [name for began, name in self.steps if began <= at][-1]

    def put(self, *lines: str) -> None:
        """Messages; `ids` has how commands show them."""
        with closing(source_of(self.run.cell.queue, self.run.cell.database)) as queue:
            queue.put([line.encode() for line in lines])
            self.ids = {one.payload.decode(): one.shown_id for one in queue.peek(100)}

    def runs(self) -> None:
        self.run.run(build(self.run.cell))

    def killed(self, point: str) -> None:
        assert run_driver(self.run.cell, f"{point}=kill") == KILLED

    def refused(self) -> str:
        """A run that ends with an error; its text."""
        with pytest.raises((PositionMismatch, SinkRefused)) as refused:
            self.runs()
        return str(refused.value)

    def decides(self, *command: str, status: int = 0) -> Any:
        """An operator's decision, in the operator's words."""
        return self.run.command(*command, "--by", "ann", "--why", f"because of {self.steps[-1][1]}", status=status)

    def walk(self) -> None:
        """All of it. A comment behind a line says which txid it is."""
        self.run.sql("create table numbers (n int check (n >= 0), _txid bigint, _message_id text)")
        self.monkeypatch.setenv("STORMPROOF_REJECTS_MAX_SHARE", "1")
        with self.step("another life"):
            self.put("1", "2")
            self.runs()
        self.run.sql("drop schema stormproof cascade")
        prepared_database(self.run.cell.database)
        with self.step("a new life"):
            self.put("3")
            *_, incarnation = self.refused().split(" ")
            self.decides("ledger", "adopt", NAME, incarnation)
            self.runs()  # 1
        with self.step("failures"):
            self.put("10", "once 11", "bad", "worse")
            self.runs()  # 2, and its retry: 3
        with self.step("rejects"):
            self.put("20", "-21", "-22")
            self.runs()  # 4
        with self.step("an aborted batch"):
            self.put("30", "31")
            self.killed("open.after")  # 5
            self.runs()  # 6
        with self.step("a lost answer of Postgres"):
            self.put("40")
            self.killed("postgres.after_commit")  # 7
            self.runs()
        with self.step("a lost answer of Delta"):
            self.put("41")
            self.killed("delta.after_log_entry")  # 8
            self.runs()
        with self.step("letters"):
            mended = self.run.cell.folder / "mended"
            mended.write_text("12")
            self.decides("dead-letters", "edit", NAME, self.ids["worse"], "--payload", str(mended))
            self.decides("dead-letters", "drop", NAME, self.ids["bad"])
            self.runs()  # 9
        with self.step("a dropped reject"):
            self.decides("dead-letters", "drop", NAME, self.ids["-22"])
        self.monkeypatch.setenv("STORMPROOF_REJECTS_MAX_SHARE", "0")
        with self.step("a skipped batch"):
            self.put("-50", "51")
            self.refused()  # 10
            self.decides("retry", NAME, "10")
            self.refused()
            self.decides("ledger", "skip", NAME, "10", "strict")
            self.runs()
        with self.step("an adopted table"):
            for statement in (
                "alter table numbers rename to before",
                "create table numbers (like before including all)",
                "insert into numbers select * from before",
                "drop table before",
            ):
                self.run.sql(statement)
            self.decides("ledger", "adopt-table", NAME, "strict")
        with self.step("a clean check"):
            self.run.command("audit", "verify", NAME, "--deep", "--by", "auditor", status=4)  # a table was given up
        with self.step("a check of a changed record"):
            change = "update stormproof.txn_sink set digest = {} where txid = 1 and sink = 'strict'"
            ((digest,),) = self.run.sql("select digest from stormproof.txn_sink where txid = 1 and sink = 'strict'")
            self.run.sql(change.format("'other'"))
            self.run.command("audit", "verify", NAME, "--by", "auditor", status=1)
            self.run.sql(change.format(f"'{digest}'"))
        with self.step("a blocked batch"):
            self.put("-60")
            self.refused()  # 11
        with self.step("unopened messages"):
            self.put("70", "71")
