"""What is stored of a broker's message: payload, and what its server said of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from stormproof.core.base.errors import UsageError
from stormproof.core.contract.payload import all_payloads, all_sealed, all_unsealed, bytes_of, sealed, unsealed

TEXTS = st.text(st.characters())  # lone surrogates too, as a client may give what is no UTF-8
VALUES = st.sampled_from(
    [
        TEXTS,
        st.integers(-(2**63), 2**63 - 1),
        st.booleans(),
        st.none(),
        st.lists(st.fixed_dictionaries({"name": TEXTS, "value": TEXTS}), max_size=2),
    ]
).map(lambda one: one | st.none())
NAMES = st.sampled_from(["id", "100 %s", 'a "word"', "\ud800"])


@st.composite
def messages(draw: st.DrawFn) -> tuple[list[bytes | None], dict[str, list[Any]]]:
    payloads = draw(st.lists(st.none() | st.binary(max_size=20), max_size=5))
    names = draw(st.lists(NAMES, unique=True))
    size = len(payloads)
    return payloads, {name: draw(st.lists(draw(VALUES), min_size=size, max_size=size)) for name in names}


@given(messages())
@example(([b"a", None], {"id": ["%s", "\udcff"], "100 %s": ["%d", "%d"]}))
@example(([b"a", b"b"], {"id": [None, 1]}))
def test_what_a_server_said_comes_back_value_by_value(given: tuple[list[bytes | None], dict[str, list[Any]]]) -> None:
    payloads, columns = given
    stored = all_sealed(payloads, list(columns), list(columns.values()))
    found, facts = all_unsealed(stored)
    assert found == all_payloads(stored) == payloads
    said = [{name: column[row] for name, column in columns.items()} for row in range(len(payloads))]
    assert [{name: one.get(name) for name in columns} for one in facts] == said


@pytest.mark.parametrize("column", [[{"a": 1}, {"a": True}], [[1], [1.0]], [0.0, -0.0], [1, True], [(), ()], [{}, {}]])
def test_equal_values_of_other_types_stay_what_they_are(column: list[Any]) -> None:
    """To Python 1, True and 1.0 are equal."""
    _, facts = all_unsealed(all_sealed([b"", b""], ["header"], [column]))
    assert [repr(one["header"]) for one in facts] == [repr([*one] if one == () else one) for one in column]


@given(st.binary(), st.lists(st.binary(), min_size=2, max_size=2))
def test_bytes_of_a_fact_come_back_as_text_that_has_all_of_them(payload: bytes, values: list[bytes]) -> None:
    stored = all_sealed([payload, payload], ["key"], [values])
    assert [bytes_of(facts["key"]) for facts in all_unsealed(stored)[1]] == values


@pytest.mark.parametrize(
    "damage", [b"", b"plain text", b"\xff\xff\xff\xfe\0", b"\xff\xff\xff\xfe\0\0\0\x02[]x", b"\xff" * 9]
)
def test_control_what_was_not_stored_so_is_refused(damage: bytes) -> None:
    with pytest.raises(UsageError, match="one of 2 stored messages has not"):
        all_unsealed([sealed(b"payload", {"id": "1"}), damage])


def test_a_message_without_payload_is_none_with_empty_bytes() -> None:
    assert unsealed(sealed(None, {"id": "1", "time": None})) == (None, {"id": "1"})
    assert unsealed(sealed(b"", {"id": "1"})) == (b"", {"id": "1"})
