"""Which txids a sink that joined later does not have: those that were committed while it was no part of its topology."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Final

import sqlalchemy as sa
from pydantic import StrictInt, TypeAdapter, ValidationError

from stormproof.core.base.errors import Json
from stormproof.trident.ledger import tables as t
from stormproof.trident.terms.transaction_states import EventKind, TxnState

MISSING: Final = "missing"
"""The key of what a joining sink lacks, in the detail of a `graph` event."""
_KEPT: Final = (TxnState.PREPARED.value, TxnState.BLOCKED.value, TxnState.COMMITTED.value)
"""States of a batch that is committed, or will be, to the sinks that it was prepared for."""


@dataclass(frozen=True, slots=True)
class Missing:
    """Txids that a sink lacks: the lowest, the highest, their number, and the number of their messages.

    `pruned_upto`: the ledger was pruned up to here before they were counted; only later ones are in the numbers.
    """

    first: StrictInt
    last: StrictInt
    txids: StrictInt
    messages: StrictInt
    pruned_upto: StrictInt | None = None

    def __str__(self) -> str:
        messages = "1 message" if self.messages == 1 else f"{self.messages} messages"
        if self.pruned_upto is not None:
            later = f", later ones: {self.txids} of {messages}" if self.txids else ""
            return f"txids {self.first} to {self.last} (up to {self.pruned_upto} pruned and not counted{later})"
        if self.txids == 1:
            return f"txid {self.first} ({messages})"
        return f"{self.txids} txids from {self.first} to {self.last} ({messages})"

    def to_json(self) -> dict[str, Json]:
        """As an event's detail has it."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @staticmethod
    def of_json(detail: object) -> Missing | None:
        """From an event's detail; None where it cannot be read."""
        try:
            return _MISSING.validate_python(detail)
        except ValidationError:
            return None


_MISSING: Final = TypeAdapter(Missing)


@dataclass(frozen=True, slots=True)
class Shape:
    """The sinks of a topology from one epoch on, and the highest txid before it."""

    epoch: int
    after_txid: int
    sinks: frozenset[str]


@dataclass(frozen=True, slots=True)
class Absence:
    """A sink joined in `epoch`; txids behind `after` up to `upto` were allotted while it was not part of the topology."""

    after: int
    upto: int
    epoch: int


def absences(shapes: Sequence[Shape]) -> dict[str, tuple[Absence, ...]]:
    """For each sink its absences, oldest first. A presence without a txid makes one of the two absences around it."""
    found: dict[str, tuple[Absence, ...]] = {}
    for sink in sorted(set[str]().union(*(shape.sinks for shape in shapes))):
        gone: int | None = 0
        mine: list[Absence] = []
        for shape in shapes:
            if sink not in shape.sinks:
                gone = shape.after_txid if gone is None else gone
            elif gone is not None:
                if mine and mine[-1].upto == gone:
                    gone = mine.pop().after
                if shape.after_txid > gone:
                    mine.append(Absence(gone, shape.after_txid, shape.epoch))
                gone = None
        found[sink] = tuple(mine)
    return found


def count_missing(
    connection: sa.Connection, incarnation: str, sink: str, absence: Absence, *, pruned_upto: int = 0
) -> Missing | None:
    """The txids of an absence that were committed, or will be; None where there are none."""
    c, work = t.txn.c, t.txn_sink.c
    behind = max(absence.after, pruned_upto)
    row = connection.execute(
        sa.select(
            sa.func.min(c.txid), sa.func.max(c.txid), sa.func.count(), sa.func.coalesce(sa.func.sum(c.messages), 0)
        ).where(
            c.incarnation == incarnation,
            c.txid > behind,
            c.txid <= absence.upto,
            c.state.in_(_KEPT),
            ~sa.exists().where(work.incarnation == incarnation, work.sink == sink, work.txid == c.txid),
        )
    ).one()
    first, last, txids, messages = row
    if behind > absence.after:
        pruned = min(behind, absence.upto)
        return Missing(absence.after + 1, int(last or pruned), int(txids), int(messages), pruned)
    return Missing(int(first), int(last), int(txids), int(messages)) if txids else None


def missing_txids(
    connection: sa.Connection, incarnation: str, shapes: Sequence[Shape], *, pruned_upto: int
) -> dict[str, tuple[Missing, ...]]:
    """What each sink lacks; where the ledger was pruned since, as it was counted when the sink joined."""
    recorded = _recorded(connection, incarnation)
    found: dict[str, tuple[Missing, ...]] = {}
    for sink, mine in absences(shapes).items():
        counted: Iterable[Missing | None] = (
            recorded.get((sink, absence.epoch))
            if pruned_upto > absence.after and (sink, absence.epoch) in recorded
            else count_missing(connection, incarnation, sink, absence, pruned_upto=pruned_upto)
            for absence in mine
        )
        found[sink] = tuple(missing for missing in counted if missing is not None)
    return found


def _recorded(connection: sa.Connection, incarnation: str) -> dict[tuple[str, int], Missing]:
    c = t.event.c
    rows = connection.execute(
        sa.select(c.sink, c.detail).where(
            c.incarnation == incarnation, c.kind == EventKind.GRAPH.value, c.sink.is_not(None)
        )
    )
    found: dict[tuple[str, int], Missing] = {}
    for sink, detail in rows:
        epoch = detail.get("epoch") if isinstance(detail, dict) else None
        missing = Missing.of_json(detail.get(MISSING)) if isinstance(detail, dict) else None
        if isinstance(epoch, int) and missing is not None:
            found[str(sink), epoch] = missing
    return found
