"""`DryRun`: what a commit would do, for people and programs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Final

from stormproof.core.errors import Json
from stormproof.sinks.preview import RowsPreview, TableAction, TablePreview


class DryRunOutcome(StrEnum):
    """What the same call without `dry_run` would end with, as far as can be told."""

    COMMIT = "would commit"
    SUPPRESS = "would suppress"
    """The key is written: nothing would be computed or written."""
    ROLL_FORWARD = "would roll forward"
    """The key's content is fixed: it would be completed from its files."""
    WAIT = "would wait"
    """There is no message to open, and nothing speaks against a start."""
    CANNOT_TELL = "cannot tell"
    """A source cannot be read without taking its messages, a bolt reads a state, a sink has no preview, or its table cannot
    be read; nothing speaks against a commit at the others.
    """
    REFUSE = "would refuse"
    """A table cannot take the rows, or a row is refused: nothing would be written there."""


@dataclass(frozen=True, slots=True)
class DryRunSink:
    """What would become of one sink: of its table, and of the rows."""

    sink: str
    target: str
    mode: str
    table: TablePreview
    rows: RowsPreview

    @property
    def refuses(self) -> bool:
        """Whether nothing could be written for this sink's sake."""
        return self.table.action is TableAction.REFUSE or self.rows.refused > 0 or bool(self.rows.blocked)

    def lines(self) -> list[str]:
        """For people."""
        table, rows = self.table, self.rows
        found = [f"  {self.sink} ({self.target}), {self.mode}: {_TOLD[table.action]}"]
        found += [f"    {change}" for change in table.changes]
        if table.why:
            found.append(f"    {table.why}")
        if table.writer is not None:
            files = f"{rows.files} file{'' if rows.files == 1 else 's'}"
            found.append(f"    {rows.rows:,} rows, {files}, {rows.bytes:,} bytes")
        if rows.superseded:
            found.append(f"    {rows.superseded:,} rows left out: another row of their key is later")
        found += [f"    column {column!r}: {n:,} values would be NULL" for column, n in rows.discarded.items()]
        if rows.refused:
            found.append(f"    {rows.refused:,} rows refused, for example:")
            found += [f"      {text}" for text in rows.examples]
        if rows.rejected:
            found.append(f"    {rows.rejected:,} messages would be rejected, with all of their rows here; for example:")
            found += [f"      {text}" for text in rows.examples]
        if rows.blocked:
            found.append(f"    would block the batch: {rows.blocked}")
        found += [f"    not tried: {rule}" for rule in table.can_refuse]
        return found

    def to_json(self) -> dict[str, Json]:
        """For programs."""
        table: dict[str, Json] = {
            "action": self.table.action.value,
            "why": self.table.why,
            "changes": [*self.table.changes],
            "can_refuse": [*self.table.can_refuse],
        }
        rows: dict[str, Json] = json.loads(json.dumps(asdict(self.rows)))
        return {"sink": self.sink, "target": self.target, "mode": self.mode, "table": table, "rows": rows}


_TOLD: Final = {
    TableAction.CREATE: "would create the table",
    TableAction.USE: "would write to the table as it is",
    TableAction.ALTER: "would change the table",
    TableAction.REFUSE: "would refuse",
    TableAction.CANNOT_TELL: "cannot tell",
}


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a call would do; `str` of it is for people, `to_json` for programs. Nothing was done.

    `txid` is the one that has the key's rows, or else the next one. `rows` is how many the job computed; None where it was
    not run, since the key is written or no sink can be previewed. `notes` says what a call would do before, or what a person
    has to know.
    """

    name: str
    key: str
    outcome: DryRunOutcome
    txid: int
    rows: int | None
    sinks: tuple[DryRunSink, ...]
    notes: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether the call would be refused."""
        return self.outcome is DryRunOutcome.REFUSE

    def __str__(self) -> str:
        rows = "" if self.rows is None else f", {self.rows:,} rows"
        lines = [f"dry run of {self.name}, key {self.key!r}: {self.outcome}, txid {self.txid}{rows}"]
        for sink in self.sinks:
            lines += sink.lines()
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Json]:
        """The same for programs."""
        return {
            "name": self.name,
            "key": self.key,
            "outcome": self.outcome.value,
            "txid": self.txid,
            "rows": self.rows,
            "sinks": [sink.to_json() for sink in self.sinks],
            "notes": [*self.notes],
        }


@dataclass(frozen=True, slots=True)
class TopologyDryRun:
    """What the next batch of a topology would do; `str` of it is for people, `to_json` for programs. Nothing was done.

    `txid` is the next one. `messages` were read: at most one batch, of those that were never opened. `failed` of them fail;
    there are some `examples`. `unread` says why messages of a source were not read. `notes` says what a start would do
    before.
    """

    name: str
    outcome: DryRunOutcome
    txid: int
    messages: int
    failed: int
    sinks: tuple[DryRunSink, ...]
    examples: tuple[str, ...] = ()
    unread: str = ""
    notes: tuple[str, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether a start would be refused."""
        return self.outcome is DryRunOutcome.REFUSE

    def __str__(self) -> str:
        read = f"{self.messages:,} messages read, {self.failed:,} would fail"
        lines = [f"dry run of topology {self.name}: {self.outcome}, txid {self.txid}; {read}"]
        lines += [f"  failed: {text}" for text in self.examples]
        lines += [f"  not read: {self.unread}"] if self.unread else []
        for sink in self.sinks:
            lines += sink.lines()
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])

    def to_json(self) -> dict[str, Json]:
        """The same for programs."""
        return {
            "name": self.name,
            "outcome": self.outcome.value,
            "txid": self.txid,
            "messages": self.messages,
            "failed": self.failed,
            "examples": [*self.examples],
            "unread": self.unread,
            "sinks": [sink.to_json() for sink in self.sinks],
            "notes": [*self.notes],
        }


def outcome_of(sinks: Sequence[DryRunSink]) -> DryRunOutcome:
    """What a call that is to write would end with."""
    if any(sink.refuses for sink in sinks):
        return DryRunOutcome.REFUSE
    unknown = any(sink.table.action is TableAction.CANNOT_TELL for sink in sinks)
    return DryRunOutcome.CANNOT_TELL if unknown else DryRunOutcome.COMMIT
