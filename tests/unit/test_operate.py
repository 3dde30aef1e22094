"""Users' functions over record batches: which rows fail, and for which reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from stormproof.core.base.message import FailureReason
from stormproof.core.bolt import FailTuple
from stormproof.core.contract.schema import parse_schema
from stormproof.core.graph.components import OperationKind
from stormproof.core.graph.plan import OperationNode
from stormproof.core.task.operate import apply

ROWS = pa.record_batch({"word": ["a", "refused", "raised", "b"]})


def by_word(word: str) -> str:
    if word == "refused":
        raise FailTuple("not today")
    if word == "raised":
        raise ValueError("broken")
    return word


def by_batch(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, Any]:
    for word in rows.column("word").to_pylist():
        by_word(word)
    return rows, range(rows.num_rows)


@pytest.mark.parametrize(
    ("kind", "function"),
    [
        (OperationKind.MAP, by_word),
        (OperationKind.FLAT_MAP, lambda word: [by_word(word)]),
        (OperationKind.FILTER, lambda word: bool(by_word(word))),
        (OperationKind.ARROW, by_batch),
    ],
)
def test_fail_tuple_is_told_from_other_exceptions(kind: OperationKind, function: Callable[..., Any]) -> None:
    outcome = apply(OperationNode("f", kind, function, ("word",), parse_schema("word string"), ()), ROWS)
    assert (sorted(outcome.failed), dict(outcome.reasons)) == ([1, 2], {1: FailureReason.FAILED})
    assert outcome.failed[1].startswith("not today (test_operate.py:")
    assert outcome.failed[2].startswith("ValueError: broken (test_operate.py:")
