"""What a sink's table holds, compared with what is on record of its txids: rows changed, deleted, added or doubled since.

A sink whose rows can be told from others' compares them by content digests (`sinks.rows.content`). What it cannot look at,
it names, with the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol, TypeAlias, runtime_checkable

from stormproof.core.contract.sink import PreparedFile, SinkInput
from stormproof.sinks.rows.content import Content, Totals, summed_columns

Progress: TypeAlias = Callable[[int, int | None], None]
"""Told how many rows of how many were looked at by now; None: their number is not known."""


Span: TypeAlias = tuple[int, int | None]
"""The first txid that is looked at, and the last one; None: the newest."""


def within(txid: int, span: Span) -> bool:
    """Whether the txid is looked at."""
    return txid >= span[0] and (span[1] is None or txid <= span[1])


class RowProblem(StrEnum):
    """What is wrong with a table's rows; append-only."""

    ROWS_CHANGED = "rows_changed"
    """As many rows as were written, and others."""
    ROWS_MISSING = "rows_missing"
    """Fewer rows than were written."""
    ROWS_ADDED = "rows_added"
    """Rows that no txid on record has written, or that are there more than once."""
    FILE_CHANGED = "file_changed"
    """A file is not as it was written."""
    STATISTICS_WRONG = "statistics_wrong"
    """The table's statistics of a file exclude a row that it holds: readers with a filter do not find it."""


@dataclass(frozen=True, slots=True)
class WrongRows:
    """One difference."""

    problem: RowProblem
    text: str
    txid: int | None = None
    by_others: bool = False
    """They are other writers' own rows, beside those that the topology wrote."""


@dataclass(frozen=True, slots=True)
class RowsOnRecord:
    """What the ledger has of a sink's txids, read after the table was.

    `files` has the prepared files by txid, without those of batches that were skipped. Txids up to `pruned` may lack there.
    The rows of txids up to `given_up` were given up by a person, with the table that held them.
    """

    files: Mapping[int, tuple[PreparedFile, ...]]
    pruned: int = 0
    given_up: int = 0


ReadRecord: TypeAlias = Callable[[], RowsOnRecord]


@dataclass(frozen=True, slots=True)
class Comparison:
    """What came of it. `rows` were compared, in the way that `compared` says; `left_out` says what was not, and why."""

    rows: int = 0
    compared: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    wrong: tuple[WrongRows, ...] = ()


@dataclass(slots=True)
class Compared:
    """Collects a `Comparison`."""

    rows: int = 0
    compared: list[str] = field(default_factory=list[str])
    left_out: list[str] = field(default_factory=list[str])
    wrong: list[WrongRows] = field(default_factory=list[WrongRows])

    def differs(
        self, what: str, expected: Content, found: Content, txid: int | None = None, *, by_others: bool = False
    ) -> bool:
        """Note the difference of two contents, if there is one."""
        if expected.rows == found.rows:
            if expected.total == found.total:
                return False
            problem, text = (
                RowProblem.ROWS_CHANGED,
                f"{found.rows} rows are there as written, and not with their values",
            )
        elif found.rows < expected.rows:
            problem, text = (
                RowProblem.ROWS_MISSING,
                f"{found.rows} rows are there of the {expected.rows} that were written",
            )
        else:
            problem, text = RowProblem.ROWS_ADDED, f"{found.rows} rows are there, {expected.rows} were written"
        self.add(problem, f"{what}: {text}", txid, by_others=by_others)
        return True

    def by_key(self, input_: SinkInput, expected: Totals | None, there: Totals, doubled: int | None) -> None:
        """Compare what a table by key holds with what is `expected`; `doubled` keys are there more than once."""
        rows = there.rows or 0
        self.rows += rows
        if doubled is None:
            self.left_out.append("its keys: their type has no one equality")
        elif doubled:
            self.add(RowProblem.ROWS_ADDED, f"{doubled} keys are in the table more than once")
        else:
            self.compared.append(f"that each of its {rows} rows has a key of its own")
        if expected is None or expected.rows is None:
            self.left_out.append(
                "its number of rows: how many keys were inserted is not on record of each of its commits"
            )
        elif expected.rows == rows:
            self.compared.append("its number of rows, with the keys that were inserted on record")
        else:
            self.differs("the table", Content(expected.rows, 0), Content(rows, 0), by_others=rows > expected.rows)
        for name in summed_columns(input_.folds):
            known, found = None if expected is None else expected.sum_of(name), there.sums.get(name)
            agrees = None
            if expected is not None and known is not None and found is not None:
                agrees = known.agrees(found, input_.schema.field(name).type, expected.commits)
            if agrees:
                self.compared.append(f"the sum of its column {name!r}, with what the txids added")
            elif agrees is None:
                self.left_out.append(f"the sum of its column {name!r}: it is not finite, or not all of it is on record")
            else:
                others = expected is not None and expected.rows is not None and rows > expected.rows
                self.add(
                    RowProblem.ROWS_CHANGED,
                    f"its column {name!r} sums up to another number than the txids added",
                    by_others=others,
                )
        self._by_content(input_, expected, there)

    def _by_content(self, input_: SinkInput, expected: Totals | None, there: Totals) -> None:
        known = None if expected is None else expected.content
        if expected is None or known is None or there.content is None:
            self._not_compared(
                input_, (), "rows are overwritten by key, and what each commit replaced is not on record"
            )
            return
        names = [name for name, _ in known.kinds]
        if known.total == there.content.total:
            self.compared.append(f"the values of its {there.rows} rows, with those that the txids put and replaced")
        elif expected.rows in (None, there.rows):
            text = f"{there.rows} rows are there, and not with the values that the txids put"
            self.add(RowProblem.ROWS_CHANGED, f"the table: {text}")
        if names:
            self._not_compared(input_, names, "their type has no digest")

    def by_txid(
        self,
        counts: Mapping[int | None, int],
        written: Mapping[int, int],
        span: Span,
        *,
        given_up: int,
        pruned: int = 0,
        began_empty: bool,
    ) -> None:
        """Compare how many rows of a table by key name each txid, by the lineage column, with how many that one has
        `written`. Of txids up to `pruned` that is not known of each.
        """
        rows = 0
        for txid, number in counts.items():
            if txid is not None and (not within(txid, span) or txid <= given_up):
                continue
            if txid is not None and txid in written:
                rows += number
                if number > written[txid]:
                    text = f"txid {txid}: {number} rows name it, it wrote {written[txid]}"
                    self.add(RowProblem.ROWS_ADDED, text, txid)
            elif txid is None or txid > pruned:
                self.strangers(txid, number, began_empty=began_empty)
        self.compared.append(f"that no txid has more rows than it wrote, by the lineage column of {rows} rows")

    def strangers(self, txid: int | None, rows: int, *, began_empty: bool) -> None:
        """Note rows that name a txid which nobody has on record; the table `began_empty`, or may have had them before."""
        text = f"{rows} rows name {'no txid' if txid is None else f'txid {txid}, which is not on record'}"
        if began_empty:
            self.add(RowProblem.ROWS_ADDED, text, txid, by_others=True)
        else:
            self.left_out.append(f"{text}: it is not on record that the table was empty before the first txid")

    def not_in_part(self, input_: SinkInput) -> None:
        """Note that some txids' rows cannot be told from others'."""
        self.left_out.append("rows are overwritten by key: only the table with all of its txids")
        self._not_compared(input_, (), "rows are overwritten by key")

    def _not_compared(self, input_: SinkInput, compared: Collection[str], why: str) -> None:
        lineage = () if input_.lineage is None else input_.lineage.columns.names
        # By their number and one by one keys are compared anyway, but not that each is still the one that was written.
        covered = {*(() if compared else input_.keys), *summed_columns(input_.folds), *lineage, *compared}
        names = ", ".join(repr(name) for name in input_.schema.names if name not in covered)
        if names:
            self.left_out.append(f"the values of its columns {names}: {why}")

    def add(self, problem: RowProblem, text: str, txid: int | None = None, *, by_others: bool = False) -> None:
        """Note something that is wrong."""
        self.wrong.append(WrongRows(problem, text, txid, by_others))

    @property
    def comparison(self) -> Comparison:
        """All of it."""
        return Comparison(self.rows, tuple(self.compared), tuple(self.left_out), tuple(self.wrong))


@runtime_checkable
class SupportsCompareRows(Protocol):
    """A session that can read its table again."""

    def compare_rows(self, read: ReadRecord, first: int, last: int | None, progress: Progress) -> Comparison:
        """Compare the rows of txids from `first` to `last` (None: the newest) with what is on record of them.

        The table and its own evidence are read at one instant; then `read` is called once. Memory is bounded: rows are
        read in batches. A driver is not disturbed.

        Raises:
            StoreUnavailable: the store does not answer.
            SinkRefused: the table is gone or cannot be read.
        """
        ...


def ranges(numbers: Iterable[int]) -> list[str]:
    """Numbers as people write them: 1-3, 7."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return [f"{low}" if low == high else f"{low}-{high}" for low, high in parts]


def spans(txids: Collection[int]) -> str:
    """The first ten ranges of txids, and how many more there are."""
    shown = ranges(txids)
    return ", ".join(shown[:10]) + (f" and {len(shown) - 10} more" if len(shown) > 10 else "")
