"""The cases that Trident's own page and tests give for its states, with value, previous value and txid after each step."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from stormproof.core.base.errors import PositionMismatch
from stormproof.sinks.contract.protocol import SinkIdentity
from stormproof.trident.state.key_value import MemoryMap
from stormproof.trident.state.map import StoredMap, total
from stormproof.trident.state.protocol import StateContext, StateKind

SCHEMA = pa.schema([pa.field("word", pa.string()), pa.field("count", pa.int64())])
CONTEXT = StateContext(SinkIdentity("t", "life", "counts"), SCHEMA, ("word",), {"count": total}, epoch=1)
TRANSACTIONAL, OPAQUE = StateKind.TRANSACTIONAL, StateKind.OPAQUE


class Case:
    """One map, and what it stores of each word: (value, previous value, txid)."""

    def __init__(self, kind: StateKind) -> None:
        self.memory = MemoryMap(kind)
        self.state: StoredMap = self.memory.make(CONTEXT)

    def batch(self, txid: int, *words: str, **counts: int) -> None:
        """A batch of tuples, each counting one, or partial counts."""
        self.state.begin_commit(txid)
        self.update(*((word, 1) for word in words), *counts.items())
        self.state.commit(txid)

    def update(self, *counts: tuple[str, int]) -> None:
        rows = [{"word": word, "count": n} for word, n in counts]
        self.state.multi_update(pa.RecordBatch.from_pylist(rows, schema=SCHEMA))

    def put(self, word: str, n: int | None) -> None:
        self.state.multi_put(pa.RecordBatch.from_pylist([{"word": word, "count": n}], schema=SCHEMA))

    def get(self, word: str) -> Any:
        return self.state.multi_get(pa.record_batch([[word]], names=["word"])).column(0)[0].as_py()

    def stored(self, word: str) -> tuple[int | None, int | None, int | None]:
        row = self.memory.items().get((word,), {})
        return row.get("count"), row.get("previous_count"), row.get("txid")


def test_the_page_transactional() -> None:
    """txid 3 is man, man, dog; the first try wrote dog and was cut short before man."""
    case = Case(TRANSACTIONAL)
    case.batch(1, man=3)
    case.batch(2, apple=10)
    case.batch(3, dog=4)
    assert [case.stored(w) for w in ("man", "dog", "apple")] == [(3, None, 1), (4, None, 3), (10, None, 2)]
    case.batch(3, "man", "man", "dog")
    assert [case.stored(w) for w in ("man", "dog", "apple")] == [(5, None, 3), (4, None, 3), (10, None, 2)]


@pytest.mark.parametrize(("txid", "after"), [(3, (6, 4, 3)), (2, (3, 1, 2))], ids=["next txid", "the same txid"])
def test_the_page_opaque(txid: int, after: tuple[int, int, int]) -> None:
    """{value 4, previous 1, txid 2}, and a partial count of 2."""
    case = Case(OPAQUE)
    case.batch(1, word=1)
    case.batch(2, word=3)
    assert case.stored("word") == (4, 1, 2)
    case.batch(txid, word=2)
    assert case.stored("word") == after


def test_three_txids_with_replays_transactional() -> None:
    case = Case(TRANSACTIONAL)
    steps: list[tuple[int, tuple[str, ...], tuple[int, None, int]]] = [
        (1, ("a", "a"), (2, None, 1)),
        (1, ("a", "a"), (2, None, 1)),
        (2, ("a",), (3, None, 2)),
        (2, ("a",), (3, None, 2)),
        (2, ("a",), (3, None, 2)),
        (3, ("a", "a", "a"), (6, None, 3)),
        (3, ("a", "a", "a"), (6, None, 3)),
    ]
    for txid, words, after in steps:
        case.batch(txid, *words)
        assert case.stored("a") == after


def test_three_txids_with_replays_of_other_content_opaque() -> None:
    case = Case(OPAQUE)
    steps: list[tuple[int, int, tuple[int, int | None, int]]] = [
        (1, 2, (2, None, 1)),
        (1, 5, (5, None, 1)),
        (2, 1, (6, 5, 2)),
        (2, 4, (9, 5, 2)),
        (2, 1, (6, 5, 2)),
        (3, 3, (9, 6, 3)),
        (3, 3, (9, 6, 3)),
    ]
    for txid, n, after in steps:
        case.batch(txid, a=n)
        assert case.stored("a") == after


def test_opaque_value() -> None:
    """A commit of a later txid, and a reader, see the value; one of the same txid the previous value."""
    case = Case(OPAQUE)
    case.batch(7, a=10)
    case.batch(8, a=1)
    assert (case.stored("a"), case.get("a")) == ((11, 10, 8), 11)
    for txid, seen in ((9, 11), (100, 11), (8, 10)):
        case.state.begin_commit(txid)
        assert case.get("a") == seen
    case.state.begin_commit(7)
    case.update(("a", 1))
    with pytest.raises(PositionMismatch, match="txid 8, which is later than txid 7"):
        case.state.commit(7)


def test_opaque_map() -> None:
    case = Case(OPAQUE)
    case.state.begin_commit(1)
    assert case.get("a") is None
    case.update(("a", 1))
    case.update(("a", 2))
    case.state.commit(1)
    assert case.stored("a") == (3, None, 1)
    case.state.begin_commit(1)
    assert case.get("a") is None
    case.update(("a", 2))
    case.state.commit(1)
    assert case.stored("a") == (2, None, 1)
    case.state.begin_commit(2)
    assert case.get("a") == 2
    case.update(("a", 3))
    case.update(("a", 1))
    case.state.commit(2)
    assert case.stored("a") == (6, 2, 2)


def test_transactional_map() -> None:
    case = Case(TRANSACTIONAL)
    case.state.begin_commit(1)
    case.update(("a", 1))
    case.update(("a", 2))
    case.state.commit(1)
    assert case.stored("a") == (3, None, 1)
    case.state.begin_commit(1)
    assert case.get("a") == 3
    case.update(("a", 1))
    case.update(("a", 2))
    case.state.commit(1)
    assert case.stored("a") == (3, None, 1)
    case.state.begin_commit(2)
    assert case.get("a") == 3
    case.update(("a", 3))
    case.update(("a", 1))
    case.state.commit(2)
    assert case.stored("a") == (7, None, 2)


def test_remove() -> None:
    """A value that is set to NULL is none; a txid that begins again sees it back."""
    case = Case(OPAQUE)
    case.state.begin_commit(1)
    case.put("a", 1)
    case.put("b", 2)
    case.state.commit(1)
    case.state.begin_commit(2)
    case.put("a", None)
    case.state.commit(2)
    assert (case.get("a"), case.get("b")) == (None, 2)
    case.state.begin_commit(2)
    assert (case.get("a"), case.get("b")) == (1, 2)
    case.put("a", None)
    case.state.commit(2)
    case.state.begin_commit(3)
    assert (case.get("a"), case.get("b")) == (None, 2)


def test_transactional_is_not_for_other_content() -> None:
    """Why Trident needs opaque states behind opaque spouts; here a txid's rows never change once a state is touched."""
    case = Case(TRANSACTIONAL)
    case.batch(1, a=2)
    case.batch(1, a=5)
    assert case.stored("a") == (2, None, 1)


def test_a_key_of_the_first_try_alone_stays_also_in_opaque_form() -> None:
    """What not even an opaque state can undo: the next try does not have the key, and a later txid brings it again.

    Trident's opaque form has this gap; here it cannot be met, since every try of a txid has the same keys.
    """
    case = Case(OPAQUE)
    case.batch(1, a=1)  # cut short after this key
    case.batch(1, b=1)
    case.batch(2, a=1)
    assert case.stored("a") == (2, 1, 2)
    assert case.stored("b") == (1, None, 1)
