"""Values to columns: culprits are found wherever they lie, and cost the others nothing."""

from __future__ import annotations

import pyarrow as pa
import pytest

from stormproof.core.user_code import functions
from stormproof.core.user_code.functions import SMALL_PART, column_of

LONG = pa.field("n", pa.int64(), nullable=False)


@pytest.mark.parametrize("bad", [[], [0], [999], [0, 15, 16, 17, 499, 500, 998, 999], list(range(1000))])
@pytest.mark.parametrize("culprit", ["x", 1.5, None, True, 2**64])
def test_culprits_are_found_wherever_they_lie(bad: list[int], culprit: object) -> None:
    values: list[object] = list(range(1000))
    for row in bad:
        values[row] = culprit
    array, errors = column_of(values, LONG)
    assert [row for row, _ in errors] == bad
    assert all("field 'n'" in text for _, text in errors)
    assert [v for row, v in enumerate(array.to_pylist()) if row not in bad] == [i for i in range(1000) if i not in bad]


def test_one_culprit_is_found_by_halving(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[object] = []
    problem = functions._problem  # pyright: ignore[reportPrivateUsage]

    def counted(value: object, field: pa.Field, strict: frozenset[type] | None) -> str | None:
        looked_at.append(value)
        return problem(value, field, strict)

    monkeypatch.setattr(functions, "_problem", counted)
    values: list[object] = list(range(10_000))
    values[4321] = "x"
    _, errors = column_of(values, LONG)
    assert [row for row, _ in errors] == [4321]
    assert 0 < len(looked_at) <= SMALL_PART
