"""The content digest of rows: the same in any order and form, another after any change."""

from __future__ import annotations

import decimal
import random
from datetime import UTC, date, datetime
from typing import Any

import pyarrow as pa
import pytest

from stormproof.sinks.rows.content import BLOCK_ROWS, Content, ContentSum, content_by, kind_of, kinds_of

SCHEMA = pa.schema(
    [
        ("n", pa.int64()),
        ("x", pa.float64()),
        ("text", pa.string()),
        ("raw", pa.binary()),
        ("day", pa.date32()),
        ("at", pa.timestamp("us", "UTC")),
        ("price", pa.decimal128(20, 3)),
        ("yes", pa.bool_()),
    ]
)


def row(i: int) -> dict[str, Any]:
    return {
        "n": i,
        "x": i / 7,
        "text": f"row {i}" * (i % 40),
        "raw": bytes([i % 256]) * (i % 11),
        "day": date.fromordinal(700_000 + i),
        "at": datetime.fromtimestamp(i, UTC),
        "price": decimal.Decimal(i) / 8,
        "yes": i % 2 == 0,
    }


ROWS = [row(i) for i in range(300)]


def content(rows: list[dict[str, Any]], schema: pa.Schema = SCHEMA, size: int = 10**9) -> Content:
    total = ContentSum(kinds_of(schema))
    for at in range(0, len(rows), size):
        total.add(pa.RecordBatch.from_pylist(rows[at : at + size], schema))
    return total.content


def test_every_type_of_the_schema_is_hashed() -> None:
    assert [name for name, _ in kinds_of(SCHEMA)] == sorted(SCHEMA.names)


@pytest.mark.parametrize("seed", range(5))
def test_order_and_batches_do_not_matter(seed: int) -> None:
    rng = random.Random(seed)
    shuffled = rng.sample(ROWS, len(ROWS))
    assert content(shuffled, size=rng.randint(1, 200)) == content(ROWS)


def test_the_contents_of_parts_add_up() -> None:
    assert content(ROWS[:100]) + content(ROWS[100:]) == content(ROWS)


@pytest.mark.parametrize("name", SCHEMA.names)
def test_a_change_of_one_value_changes_the_digest(name: str) -> None:
    changed = [{**ROWS[0], name: row(1)[name]}, *ROWS[1:]]
    missing = [{**ROWS[7], name: None}, *ROWS[:7], *ROWS[8:]]
    assert len({content(ROWS).total, content(changed).total, content(missing).total}) == 3


def test_each_bit_of_a_text_counts() -> None:
    schema = pa.schema([("text", pa.string())])
    for length in (1, 7, 8, 9, 16, 511, 512, 513, 600):
        text = "a" * length
        seen = {content([{"text": text[:i] + "b" + text[i + 1 :]}], schema).total for i in range(length)}
        assert len(seen) == length


def test_rows_that_swap_a_value_change_the_digest() -> None:
    one, other = ROWS[3], ROWS[4]
    swapped = [{**one, "n": other["n"]}, {**other, "n": one["n"]}]
    assert content(swapped).total != content([one, other]).total


def test_signs_that_change_together_change_the_digest() -> None:
    schema = pa.schema([("x", pa.float64()), ("y", pa.float64())])
    assert content([{"x": 1.0, "y": 2.0}], schema).total != content([{"x": -1.0, "y": -2.0}], schema).total


def test_a_row_more_or_twice_changes_rows_and_sum() -> None:
    doubled = content([*ROWS, ROWS[0], ROWS[0]])
    assert (doubled.rows, doubled.total != content(ROWS).total) == (302, True)


def test_a_column_that_is_null_is_as_one_that_is_not_there() -> None:
    wider = pa.schema([("added", pa.string()), *SCHEMA])
    assert content(ROWS, wider).total == content(ROWS).total


def test_the_order_of_columns_does_not_matter() -> None:
    assert content(ROWS, pa.schema(list(SCHEMA)[::-1])) == content(ROWS)


@pytest.mark.parametrize(
    ("one", "other", "values"),
    [
        (pa.int32(), pa.int64(), [1, -5, None]),
        (pa.float32(), pa.float64(), [0.5, -3.25, None, float("nan")]),
        (pa.string(), pa.large_string(), ["a", "", None, "z" * 700]),
        (pa.string(), pa.dictionary(pa.int32(), pa.string()), ["a", "b", None, "a"]),
        (pa.string(), pa.string_view(), ["a", "long enough for a view", None]),
        (pa.binary(), pa.binary(3), [b"abc", None, b"\0\0\0"]),
        (pa.timestamp("s"), pa.timestamp("us"), [datetime.fromtimestamp(7_000, UTC).replace(tzinfo=None), None]),
        (pa.decimal128(9, 2), pa.decimal128(30, 2), [decimal.Decimal("1.25"), decimal.Decimal(-3), None]),
    ],
)
def test_types_of_one_kind_have_one_digest(one: pa.DataType, other: pa.DataType, values: list[Any]) -> None:
    assert kind_of(one) == kind_of(other)
    found = []
    for type_ in (one, other):
        total = ContentSum(kinds_of(pa.schema([("v", type_)])))
        total.add(pa.RecordBatch.from_arrays([pa.array(values, one).cast(type_)], names=["v"]))
        found.append(total.content)
    assert found[0] == found[1]


def test_negative_zero_is_zero_and_nan_is_nan() -> None:
    schema = pa.schema([("x", pa.float64())])
    assert content([{"x": -0.0}], schema) == content([{"x": 0.0}], schema)


def test_a_slice_is_hashed_as_the_same_rows_alone() -> None:
    batch = pa.RecordBatch.from_pylist(ROWS, SCHEMA).slice(37, 101)
    total = ContentSum(kinds_of(SCHEMA))
    total.add(batch)
    assert total.content == content(ROWS[37:138])


def test_blocks_do_not_matter() -> None:
    schema = pa.schema([("n", pa.int64()), ("text", pa.string())])
    many = pa.RecordBatch.from_pydict({"n": range(2 * BLOCK_ROWS + 5), "text": ["x"] * (2 * BLOCK_ROWS + 5)}, schema)
    whole, parts = ContentSum(kinds_of(schema)), ContentSum(kinds_of(schema))
    whole.add(many)
    for at in range(0, many.num_rows, 5_000):
        parts.add(many.slice(at, 5_000))
    assert whole.content == parts.content


def test_contents_by_a_column_are_those_of_its_groups() -> None:
    batch = pa.RecordBatch.from_pylist(ROWS, SCHEMA).append_column("g", pa.array([i % 3 or None for i in range(300)]))
    found = content_by(batch, kinds_of(SCHEMA), "g")
    assert found == {g: content([r for i, r in enumerate(ROWS) if (i % 3 or None) == g]) for g in (1, 2, None)}


def test_a_text_gives_the_content_back() -> None:
    assert Content.of_text(content(ROWS).to_text()) == content(ROWS)
    assert Content.of_text("") is None


def test_columns_that_change_their_kind_do_not_add_up() -> None:
    one, other = (
        content([{"n": 1}], pa.schema([("n", pa.int64())])),
        content([{"n": "1"}], pa.schema([("n", pa.string())])),
    )
    with pytest.raises(ValueError, match="'n' was integer, and is text"):
        _ = one + other
