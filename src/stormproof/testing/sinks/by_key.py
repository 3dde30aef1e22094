"""Conformance of sinks that change rows by their key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from itertools import permutations
from typing import Any, Final

import pyarrow as pa
import pytest

from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.fold import AnyFold, ByOrder, End, SetTruncated, SetUnion
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.contract.protocol import CommitOutcome, CommitResult, PreparedTransaction, SinkSession
from stormproof.testing.sinks.harness import SinkHarness


def _input(columns: dict[str, tuple[pa.DataType, AnyFold]]) -> SinkInput:
    schema = pa.schema([("word", pa.string()), *((name, kind) for name, (kind, _) in columns.items())])
    return SinkInput.for_fold(schema, ("word",), {name: fold for name, (_, fold) in columns.items()})


_FIRST, _LAST = ByOrder(End.FIRST, ("old_at", "old")), ByOrder(End.LAST, ("new_at", "new"))
_ENDS: Final = _input(
    {
        "old": (pa.string(), _FIRST),
        "old_at": (pa.int64(), _FIRST),
        "new": (pa.string(), _LAST),
        "new_at": (pa.int64(), _LAST),
    }
)
_SETS: Final = _input({"xs": (pa.list_(pa.string()), SetUnion(2)), "xs_truncated": (pa.bool_(), SetTruncated("xs", 2))})


def _ends(value: str | None, at: int | None) -> dict[str, Any]:
    return {"old": value, "old_at": at, "new": value, "new_at": at}


def _set(*values: str, truncated: bool = False) -> dict[str, Any]:
    return {"xs": list(values), "xs_truncated": truncated}


def _require_folded(
    harness: SinkHarness, input_: SinkInput, cases: Sequence[tuple[Sequence[dict[str, Any]], dict[str, Any]]]
) -> None:
    """Each case's rows, one a batch, in every order: each order has a key of its own."""
    unknown = {type(fold) for fold in input_.folds.values()} - harness.sink.fold_kinds
    if unknown:
        pytest.skip(f"this sink does not declare {', '.join(sorted(kind.__name__ for kind in unknown))} in fold_kinds")
    ordered = [(rows, result) for given, result in cases for rows in permutations(given)]
    harness.input = input_
    with closing(harness.open()) as session:
        for batch in range(len(ordered[0][0])):
            rows = [{"word": f"w{key}", **given[batch]} for key, (given, _) in enumerate(ordered)]
            made = pa.RecordBatch.from_pylist(rows, input_.schema)
            session.commit(harness.prepare_rows(session, batch + 1, batch or None, [made]), checked=True)
    expected = {f"w{key}": {"word": f"w{key}", **result} for key, (_, result) in enumerate(ordered)}
    found = harness.values()
    assert len(found) == len(expected)
    assert {row["word"]: dict(row) for row in found} == expected


class FoldCases:
    """Mix this in for a sink whose `modes` include fold, with a harness whose `input` is `FOLD`.

    A case of a kind of fold that the sink's `fold_kinds` does not declare is skipped. For one that it declares beyond sums,
    minima and maxima the harness says what the table holds, column by column (`values`).
    """

    def test_a_fold_refuses_what_it_would_apply_wrongly(self, harness: SinkHarness, session: SinkSession) -> None:
        """A repeated key, a key that is NULL and a sum that overflows are refused; nothing is written."""
        for rows, why in (([("new", 1), ("new", 2)], "more than once"), ([(None, 1)], "NULL")):
            with pytest.raises(SinkRefused, match=why):
                session.commit(harness.prepare(session, 1, None, rows, tasks=len(rows)), checked=True)
        session.commit(harness.prepare(session, 1, None, {"big": 2**63 - 1, "a": 1}), checked=True)
        with pytest.raises(SinkRefused):
            session.commit(harness.prepare(session, 2, 1, {"big": 1, "a": 1}), checked=True)
        assert session.held() is not None
        assert harness.rows() == Counter({("big", 2**63 - 1): 1, ("a", 1): 1})

    def test_a_fold_adds_nothing_for_null(self, harness: SinkHarness, session: SinkSession) -> None:
        """A NULL adds nothing."""
        session.commit(harness.prepare(session, 1, None, [("a", None), ("b", 2)]), checked=True)
        session.commit(harness.prepare(session, 2, 1, [("a", 3), ("b", None)]), checked=True)
        assert harness.rows() == Counter({("a", 3): 1, ("b", 2): 1})

    def test_a_fold_by_order_keeps_the_columns_of_one_row(self, harness: SinkHarness) -> None:
        """First and last, in whatever order the batches come: NULL is at the far end, equal ones go by the value."""
        _require_folded(
            harness,
            _ENDS,
            [
                (
                    [_ends("b", 2), _ends("a", 2), _ends("z", None)],
                    {"old": "a", "old_at": 2, "new": "b", "new_at": 2},
                ),
                (
                    [_ends(None, 1), _ends("a", 2), _ends("B", 3)],
                    {"old": None, "old_at": 1, "new": "B", "new_at": 3},
                ),
                (
                    [_ends(None, None), _ends("a", None), _ends("B", None)],
                    {"old": "B", "old_at": None, "new": "a", "new_at": None},
                ),
            ],
        )

    def test_a_fold_of_sets_keeps_the_least_values_and_says_that_there_were_more(self, harness: SinkHarness) -> None:
        """Text by its bytes; a set that was truncated stays marked."""
        _require_folded(
            harness,
            _SETS,
            [
                ([_set("a", "b"), _set("B"), _set()], _set("B", "a", truncated=True)),
                ([_set("a"), _set("a"), _set("b")], _set("a", "b")),
                ([_set("a", "b", truncated=True), _set(), _set("a")], _set("a", "b", truncated=True)),
                ([_set(), _set(), _set()], _set()),
            ],
        )


class UpsertCases:
    """Mix this in for a sink whose `modes` include upsert, with a harness whose `input` is `UPSERT`."""

    def test_an_upsert_refuses_what_it_would_apply_wrongly(self, harness: SinkHarness, session: SinkSession) -> None:
        """A key that two tasks wrote and a key that is NULL are refused; nothing is written."""
        for rows, why in (([("new", 1), ("new", 2)], "more than once"), ([(None, 1)], "NULL")):
            with pytest.raises(SinkRefused, match=why):
                session.commit(harness.prepare(session, 1, None, rows, tasks=len(rows)), checked=True)
        assert session.held() is None
        assert harness.rows() == Counter()

    def test_an_older_row_never_overwrites_a_newer_one(self, harness: SinkHarness, session: SinkSession) -> None:
        """In whatever order they come."""
        for txid, n in enumerate((2, 1, 3, 3, 2), start=1):
            session.commit(harness.prepare(session, txid, txid - 1 or None, {"a": n}), checked=True)
        assert harness.rows() == Counter({("a", 3): 1})

    def test_an_upsert_counts_what_it_supersedes(self, harness: SinkHarness, session: SinkSession) -> None:
        """The count is the sink's own: asked again, also by another driver, it says the same."""
        batches: list[tuple[list[tuple[str | None, int | None]], int]] = [
            ([("a", 5), ("a", 3), ("b", 1)], 1),
            ([("a", 4), ("b", 2)], 1),
            ([("a", 1), ("a", 5), ("b", 2)], 3),  # nothing of it changes the table
            ([], 0),
            ([("c", 1)], 0),
        ]
        done: list[PreparedTransaction] = []
        for txid, (rows, superseded) in enumerate(batches, start=1):
            done.append(harness.prepare(session, txid, txid - 1 or None, rows))
            assert session.commit(done[-1], checked=True) == CommitResult(CommitOutcome.APPLIED, superseded)
            session.close()
            assert session.commit(done[-1], checked=True) == CommitResult(CommitOutcome.ALREADY_HELD, superseded)
        assert harness.rows() == Counter({("a", 5): 1, ("b", 2): 1, ("c", 1): 1})
        report = session.evidence(0, None)
        assert [(e.rows, e.superseded, e.problem) for e in report.entries] == [
            (t.rows, superseded, None) for t, (_, superseded) in zip(done, batches, strict=True)
        ]
        assert report.problems == ()
