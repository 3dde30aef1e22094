"""Which table the ledger knows behind a sink, and what it means that another one is there, or none."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from stormproof.core.errors import Json, PositionMismatch

ACCEPTED_LOSS: Final = "accepted_loss"
"""Reason of an operator's event that lets a sink go on in a table which lacks rows of committed txids."""


@dataclass(frozen=True, slots=True)
class Bound:
    """The table behind a sink by the ledger: its name, its id, and the last txid that it is known to hold."""

    topology: str
    sink: str
    target: str
    table_id: str
    last_txid: int | None

    @property
    def _where(self) -> str:
        return f"sink {self.sink!r} of topology {self.topology!r}"

    @property
    def _held(self) -> str:
        return "no txid" if self.last_txid is None else f"txid {self.last_txid}"

    def is_gone(self, target: str) -> PositionMismatch:
        """There is no table of the name that the sink has now."""
        if target != self.target:
            return self._renamed(target, f"there is no table {target}")
        return PositionMismatch(
            f"{self._where}: the table {target} is gone. By the ledger it holds {self._held} (id {self.table_id}). Nothing "
            f"was made or written; inspect with: stormproof audit verify {self.topology}. Put it back "
            "(mount it, rename it back, restore it) and start again; restored from a dump it is another table: "
            f"stormproof ledger adopt-table {self.topology} {self.sink}. Or give its rows up, on "
            f"record, for an empty table: stormproof ledger adopt-table {self.topology} {self.sink} --accept-loss",
            sink=self.sink,
            ledger=self.table_id,
            found=None,
            txid=self.last_txid,
        )

    def is_another(self, target: str, table_id: str) -> PositionMismatch:
        """The table of the name that the sink has now is not the known one."""
        if target != self.target:
            return self._renamed(target, f"the table {target} is another one (id {table_id})", table_id)
        return PositionMismatch(
            f"{self._where}: the table {target} is not the one that the ledger knows (id {self.table_id}, which holds "
            f"{self._held}; now id {table_id}): it was dropped and made again, or replaced. Nothing was written. Inspect "
            f"with: stormproof audit verify {self.topology}. If it is the same table, restored from a dump: stormproof "
            f"ledger adopt-table {self.topology} {self.sink}",
            sink=self.sink,
            ledger=self.table_id,
            found=table_id,
            txid=self.last_txid,
        )

    def _renamed(self, target: str, there: str, table_id: str | None = None) -> PositionMismatch:
        return PositionMismatch(
            f"{self._where} wrote to table {self.target} so far (id {self.table_id}, which holds {self._held}); now it "
            f"names {target}, and {there}. Nothing was made or written; inspect with: "
            f"stormproof audit verify {self.topology}. Name {self.target} again; or, to go on in a table "
            "of that name, give the sink a new name, too (name=...): it begins behind the newest txid, and the old table "
            "keeps what it holds. If it is the old table, moved by a dump: give it its old name, then stormproof ledger "
            f"adopt-table {self.topology} {self.sink}",
            sink=self.sink,
            ledger=self.table_id,
            found=table_id,
            txid=self.last_txid,
            was=self.target,
            now=target,
        )


@dataclass(frozen=True, slots=True)
class Loss:
    """What a person gave up with a table: rows that txids up to `upto` had written to it, and that are nowhere now."""

    upto: int
    txids: str
    """Which of them, as ranges."""
    rows: int
    """So many rows these wrote."""
    found: int
    """So many rows there were in the table that took its place."""
    by: str = ""
    why: str = ""

    def detail(self) -> dict[str, Json]:
        """For the event that records it."""
        return {
            "upto": self.upto,
            "txids": self.txids,
            "rows": self.rows,
            "found": self.found,
            "by": self.by,
            "why": self.why,
        }

    @staticmethod
    def of(detail: dict[str, Json]) -> Loss:
        """From such an event."""
        return Loss(
            int(str(detail["upto"])),
            str(detail["txids"]),
            int(str(detail["rows"])),
            int(str(detail["found"])),
            str(detail["by"]),
            str(detail["why"]),
        )
