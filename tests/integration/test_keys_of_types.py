"""Tables whose key is a uuid, char(n) or inet, and text in the stream: each key has one text of its own."""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random
from uuid import UUID

import pytest
from support.operated import Operated

from stormproof import PostgresMap, PostgresQueue, PostgresSink, SinkRefused, Topology, sum_
from stormproof.sinks.postgres import table as table_module
from stormproof.sinks.postgres.wire import as_text

pytestmark = pytest.mark.postgres

NAME = "keyed"
KEYS = {
    "uuid": [str(UUID(int=number * 0xABCDEF0123456789)) for number in range(1, 6)],
    "character(4)": ["b", "a", "ab", "abc", " x"],
    "inet": ["10.0.0.1", "2001:db8::1", "10.0.0.1/8", "::", "10.0.0.0/8"],
}
OTHERS: dict[str, list[Callable[[str], str]]] = {
    "uuid": [str.upper, "{{{}}}".format, lambda key: key.replace("-", "")],
    "character(4)": ["{} ".format],
    "inet": [lambda key: key.upper() if "d" in key else key + ("" if "/" in key else "/128" if ":" in key else "/32")],
}
"""Other texts of a key: the table takes them for the same."""
KIND = pytest.mark.parametrize("kind", KEYS)
MODE = pytest.mark.parametrize("mode", ["upsert", "fold"])


def drawn(kind: str, seed: int) -> tuple[list[tuple[str, int]], dict[str, list[int]]]:
    """Messages, each with a key's text and a number; and the numbers of each key that came by its own text."""
    rng, messages = Random(seed), list[tuple[str, int]]()
    own: dict[str, list[int]] = {}
    for number in range(40):
        key = rng.choice(KEYS[kind])
        other = rng.choice(OTHERS[kind])(key)
        if rng.random() < 0.2 and other != key:
            key = other
        else:
            own.setdefault(key, []).append(number)
        messages.append((key, number))
    return messages, own


def read(line: str) -> tuple[str, int]:
    key, number = json.loads(line)
    return key, number


def topology(operated: Operated, mode: str) -> Topology:
    queue = PostgresQueue(NAME, schema="line string", database=operated.cell.database, max_attempts=1)
    made = Topology(NAME)
    rows = made.stream("lines", queue).map(read, "line", schema="k string, v long")
    if mode == "upsert":
        rows.into(PostgresSink("keyed", name="pg", mode="upsert", key="k", order_by="v"))
    else:
        rows.group_by("k").persistent_aggregate(v=sum_("v")).into(PostgresSink("keyed", name="pg"))
    return made


def run(operated: Operated, mode: str, messages: list[tuple[str, int]], seed: int) -> None:
    rng = Random(seed)
    while messages:
        size = rng.randint(1, 20)
        cut, messages = messages[:size], messages[size:]
        operated.put(*(json.dumps(one).encode() for one in cut))
        operated.run(topology(operated, mode), rejects_max_share=1.0)


@KIND
@MODE
def test_a_key_has_one_text_and_messages_with_another_one_fail_alone(
    operated: Operated, kind: str, mode: str, seed: int
) -> None:
    operated.sql(f"create table keyed (k {kind} primary key, v bigint)")
    messages, own = drawn(kind, seed)
    run(operated, mode, messages, seed)
    expected = {key: max(numbers) if mode == "upsert" else sum(numbers) for key, numbers in own.items()}
    spaces = "rtrim(k::text)" if kind.startswith("char") else "format('%s', k)"
    assert dict(operated.sql(f"select {spaces}, v from keyed")) == expected
    letters = operated.command("dead-letters", "list", NAME)["dead_letters"]
    assert len(letters) == len(messages) - sum(map(len, own.values()))
    assert all("as a key is written" in letter["error"] for letter in letters)
    # Values that an upsert replaced are not on record: 4.
    found = operated.command("audit", "verify", NAME, "--deep", status=4 if mode == "upsert" else 0)
    assert (found["violations"], found["unknowns"]) == ([], [])
    assert "that each of its 5 rows has a key of its own" in found["tables"][0]["compared"]


@KIND
def test_control_two_texts_of_one_key_in_a_batch_would_block_it(
    operated: Operated, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "_KEY_FORMS", {"uuid": (".", ""), "character": ("", "")})
    monkeypatch.setattr(table_module, "as_text", lambda *given, is_key: as_text(*given, is_key=False))
    operated.sql(f"create table keyed (k {kind} primary key, v bigint)")
    key = KEYS[kind][1]
    with pytest.raises(SinkRefused):
        run(operated, "upsert", [(key, 1), (OTHERS[kind][0](key), 2)], 1)


def test_a_deep_verify_finds_a_key_that_another_hand_changed(operated: Operated) -> None:
    columns = "v bigint, note interval, other tstzrange, _txid bigint, _message_id text"
    operated.sql(f"create table keyed (k inet primary key, {columns})")
    queue = PostgresQueue(NAME, schema="k string, v long, note string, other string", database=operated.cell.database)
    made = Topology(NAME)
    rows = made.stream("lines", queue)
    rows.into(PostgresSink("keyed", name="pg", mode="upsert", key="k", order_by="v", lineage=True))
    operated.put(*(json.dumps({"k": key, "v": 1, "note": "1 day", "other": "empty"}).encode() for key in KEYS["inet"]))
    operated.run(made)
    (table,) = operated.command("audit", "verify", NAME, "--deep", status=4)["tables"]
    assert "the values of its columns 'other': their type has no digest" in str(table)
    operated.sql("update keyed set k = '10.9.9.9' where k = '10.0.0.1'")
    found = operated.command("audit", "verify", NAME, "--deep", status=1)
    assert [one["kind"] for one in found["violations"]] == ["rows_changed"]


def mapped(operated: Operated) -> Topology:
    queue = PostgresQueue(NAME, schema="line string", database=operated.cell.database, max_attempts=1)
    made = Topology(NAME)
    rows = made.stream("lines", queue).map(read, "line", schema="k string, v long")
    rows.group_by("k").persistent_aggregate(v=sum_("v"), state=PostgresMap("keyed"))
    return made


def test_a_map_with_uuids_finds_its_rows_and_fails_other_texts_of_them(operated: Operated, seed: int) -> None:
    operated.sql("create table keyed (k uuid primary key, v bigint, txid bigint, life text, previous_v bigint)")
    messages, own = drawn("uuid", seed)
    for cut in (messages[:15], messages[15:]):
        operated.put(*(json.dumps(one).encode() for one in cut))
        operated.run(mapped(operated))
    assert dict(operated.sql("select k::text, v from keyed")) == {key: sum(numbers) for key, numbers in own.items()}
    letters = operated.command("dead-letters", "list", NAME)["dead_letters"]
    assert len(letters) == len(messages) - sum(map(len, own.values()))
    found = operated.command("audit", "verify", NAME, "--deep")
    assert (found["violations"], found["unknowns"]) == ([], [])
    operated.sql(f"update keyed set k = '{UUID(int=1)}' where k = '{next(iter(own))}'")
    found = operated.command("audit", "verify", NAME, "--deep", status=1)
    assert [one["kind"] for one in found["violations"]] == ["rows_changed"]


@pytest.mark.parametrize("kind", ["character(4)", "inet"])
def test_a_map_with_such_a_key_is_refused(operated: Operated, kind: str) -> None:
    operated.sql(f"create table keyed (k {kind} primary key, v bigint, txid bigint, life text, previous_v bigint)")
    with pytest.raises(SinkRefused, match=r"'k' is .* in the table and text in the stream"):
        operated.run(mapped(operated))
