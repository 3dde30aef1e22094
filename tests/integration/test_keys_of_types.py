"""Tables whose key is of another type than the stream's text: each key has one text. Numbers and times by value."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import datetime
from decimal import Decimal
from ipaddress import ip_address
from random import Random
from uuid import UUID

import pyarrow as pa
import pytest
from support.operated import Operated
from support.queues import prepared_database, put

from stormproof import PostgresMap, PostgresQueue, PostgresSink, Topology, sum_
from stormproof.core.base.arrow import pc
from stormproof.errors import SinkRefused
from stormproof.sinks.postgres import table as table_module
from stormproof.sinks.postgres.columns import Column, as_text

pytestmark = pytest.mark.postgres

NAME = "keyed"
KEYS = {
    "uuid": [str(UUID(int=number * 0xABCDEF0123456789)) for number in range(1, 6)],
    "character(4)": ["b", "a", "ab", "abc", " x"],
    "inet": ["10.0.0.1", "2001:db8::1", "10.0.0.1/8", "::", "10.0.0.0/8"],
    "citext": ["ann@a.org", "straße", "élan", "a b", "ann@a.or"],
}
OTHERS: dict[str, list[Callable[[str], str]]] = {
    "uuid": [str.upper, "{{{}}}".format, lambda key: key.replace("-", "")],
    "character(4)": ["{} ".format],
    "inet": [lambda key: key.upper() if "d" in key else key + ("" if "/" in key else "/128" if ":" in key else "/32")],
    "citext": [str.title, lambda key: key[0].upper() + key[1:], lambda key: key[:-1] + key[-1].upper()],
}
"""Other texts of a key: the table takes them for the same."""
ONE_TEXT = {"varchar(5)": ["a", "a ", "A", "b", ""], "mood": ["sad", "so so", "a.b", "ok|ko"]}
"""Keys of types of which each text is a key of its own."""
UNUSED = {
    "mood": "unused",
    "varchar(5)": "z",
    "uuid": str(UUID(int=1)),
    "character(4)": "z",
    "inet": "10.9.9.9",
    "citext": "z",
}
MOOD = "create extension citext; create type mood as enum ('sad', 'so so', 'a.b', 'ok|ko', 'unused')"
LOWERING = """
    select collname from pg_collation
    where collname in ('und-x-icu', 'tr-x-icu', 'lt-x-icu', 'C.utf8', 'en_US.utf8', 'pg_c_utf8', 'pg_unicode_fast')
"""
SHOWN = (
    "select case when pg_typeof(k) = 'character'::regtype then rtrim(k::text) else format('%s', k) end, v from keyed"
)
KIND = pytest.mark.parametrize("kind", KEYS)
MODE = pytest.mark.parametrize("mode", ["upsert", "fold"])


def drawn(kind: str, seed: int) -> tuple[list[tuple[str, int]], dict[str, list[int]]]:
    """Messages, each with a key's text and a number; and the numbers of each key that came by its own text."""
    rng, messages = Random(seed), list[tuple[str, int]]()
    own: dict[str, list[int]] = {}
    for number in range(40):
        key = rng.choice(KEYS.get(kind) or ONE_TEXT[kind])
        other = rng.choice(OTHERS.get(kind, [str]))(key)
        if rng.random() < 0.2 and other != key:
            key = other
        else:
            own.setdefault(key, []).append(number)
        messages.append((key, number))
    return messages, own


def read(line: str) -> tuple[str, int]:
    key, number = json.loads(line)
    return key, number


def topology(
    operated: Operated, mode: str, key: str = "string", row: Callable[[str], tuple[object, int]] = read
) -> Topology:
    queue = PostgresQueue(NAME, schema="line string", database=operated.cell.database, max_attempts=1)
    made = Topology(NAME)
    rows = made.stream("lines", queue).map(row, "line", schema=f"k {key}, v long")
    if mode == "upsert":
        rows.into(PostgresSink("keyed", name="pg", mode="upsert", key="k", order_by="v"))
    elif mode == "map":
        rows.group_by("k").persistent_aggregate(v=sum_("v"), state=PostgresMap("keyed"), state_name="keyed")
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


@pytest.mark.parametrize("kind", [*KEYS, *ONE_TEXT])
@MODE
def test_a_key_has_one_text_and_messages_with_another_one_fail_alone(
    operated: Operated, kind: str, mode: str, seed: int
) -> None:
    operated.sql(MOOD)
    operated.sql(f"create table keyed (k {kind} primary key, v bigint)")
    messages, own = drawn(kind, seed)
    run(operated, mode, messages, seed)
    expected = {key: max(numbers) if mode == "upsert" else sum(numbers) for key, numbers in own.items()}
    assert dict(operated.sql(SHOWN)) == expected
    letters = operated.command("dead-letters", "list", NAME)["dead_letters"]
    assert len(letters) == len(messages) - sum(map(len, own.values()))
    assert all("as a key is written" in letter["error"] for letter in letters)
    # Values that an upsert replaced are not on record: 4.
    found = operated.command("audit", "verify", NAME, "--deep", status=4 if mode == "upsert" else 0)
    assert (found["violations"], found["unknowns"]) == ([], [])
    assert f"that each of its {len(own)} rows has a key of its own" in found["tables"][0]["compared"]


@KIND
def test_control_two_texts_of_one_key_in_a_batch_would_block_it(
    operated: Operated, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table_module, "key_form", {"uuid": (".", ""), "character": ("", ""), "citext": ("", "")}.get)
    monkeypatch.setattr(table_module, "as_text", lambda *given, is_key: as_text(*given, is_key=False))
    operated.sql(MOOD)
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


MAP = "create table keyed (k {} primary key, v bigint, txid bigint, life text, previous_v bigint)"


@pytest.mark.parametrize("kind", [*KEYS, *ONE_TEXT])
def test_a_map_finds_its_rows_by_such_a_key_and_fails_other_texts_of_it(
    operated: Operated, kind: str, seed: int
) -> None:
    operated.sql(MOOD)
    operated.sql(MAP.format(kind))
    messages, own = drawn(kind, seed)
    messages += [("none of it at all", 99)] * (kind not in ("varchar(5)", "citext"))
    for cut in (messages[:15], messages[15:]):
        operated.put(*(json.dumps(one).encode() for one in cut))
        operated.run(topology(operated, "map"))
    assert dict(operated.sql(SHOWN)) == {key: sum(numbers) for key, numbers in own.items()}
    letters = operated.command("dead-letters", "list", NAME)["dead_letters"]
    assert len(letters) == len(messages) - sum(map(len, own.values()))
    found = operated.command("audit", "verify", NAME, "--deep")
    assert (found["violations"], found["unknowns"]) == ([], [])
    operated.sql(f"update keyed set k = '{UNUSED[kind]}' where k = '{next(iter(own))}'")
    found = operated.command("audit", "verify", NAME, "--deep", status=1)
    assert [one["kind"] for one in found["violations"]] == ["rows_changed"]


@pytest.mark.parametrize("kind", [*KEYS, *ONE_TEXT])
def test_a_lookup_of_text_that_is_no_key_finds_nothing_and_stops_nobody(operated: Operated, kind: str) -> None:
    operated.sql(MOOD)
    operated.sql(MAP.format(kind))
    key = {**KEYS, **ONE_TEXT}[kind][0]
    made = topology(operated, "map")
    asked = PostgresQueue("asked", schema="word string", database=operated.cell.database, max_attempts=1)
    found = made.stream("asked", asked).state_query("keyed", "word", schema="held long")
    found.into(PostgresSink("found", name="found"))
    put(prepared_database(operated.cell.database), "asked", [])
    operated.put(json.dumps([key, 7]).encode())
    operated.run(made)
    put(operated.cell.database, "asked", [key.encode(), b"none of it"])
    operated.run(made)
    assert {*operated.sql("select word, held from found")} == {(key, 7), ("none of it", None)}


@pytest.mark.parametrize("mode", ["upsert", "fold", "map"])
def test_a_label_that_an_enum_gets_while_a_topology_runs_is_a_key_at_once(operated: Operated, mode: str) -> None:
    operated.sql(MOOD)
    operated.sql(MAP.format("mood") if mode == "map" else "create table keyed (k mood primary key, v bigint)")
    operated.put(json.dumps(["sad", 1]).encode())

    def add(_: object) -> None:
        if not operated.sql("select from pg_enum where enumlabel = 'new'"):
            operated.sql("alter type mood add value 'new'")
            operated.put(json.dumps(["new", 2]).encode())

    operated.run(topology(operated, mode), on_batch=add)
    assert dict(operated.sql(SHOWN)) == {"sad": 1, "new": 2}


def test_the_pattern_of_addresses_takes_what_postgres_gives_back_and_no_other_text_of_them(
    operated: Operated, seed: int
) -> None:
    rng, key = (
        Random(seed),
        table_module.key_of_text(Column("k", "inet", "inet", -1, not_null=True, has_default=False, generated=False)),
    )
    words = [[rng.choice(["0", "0", "0", "1", "ffff", "a0"]) for _ in range(8)] for _ in range(2_000)]
    texts = [":".join(one) for one in words] + [str(ip_address(":".join(one))) for one in words]
    texts += [f"{rng.choice(['10.0.0.1', '::', '1::1'])}/{rng.randrange(129)}" for _ in range(200)]
    texts += ["::ffff:1.2.3.4", "::FFFF:1.2.3.4", "::1.2.3.4", "::1", "0::1", "::2", "010.0.0.1"]
    asked = "select t, case when pg_input_is_valid(t, 'inet') then format('%s', t::inet) = t else false end"
    shown = dict(operated.sql(f"{asked} from unnest(array{texts}) as t"))
    assert key is not None
    taken = {*key.own(pa.array([*shown]))}
    # An IPv4 address right behind ::, without ffff, is refused: nobody writes that any more.
    refused = {text for text in shown if shown[text] and text not in taken}
    assert all(re.match(r"::[\d.]+$", text) for text in refused)
    assert all(text is None or shown[str(text)] for text in taken)


def test_no_collation_has_a_lower_case_of_a_text_that_is_taken_as_a_key_of_citext(operated: Operated) -> None:
    form = table_module.key_form("citext")
    assert form is not None
    letters = [chr(code) for code in range(1, 0x110000) if not 0xD800 <= code < 0xE000]
    taken = pc.match_substring_regex(pa.array(letters), form[0]).to_pylist()
    own = {letter for letter, is_taken in zip(letters, taken, strict=True) if is_taken}
    assert all(own.issuperset(letter.lower()) for letter in letters if letter.lower() != letter)
    collations = [name for (name,) in operated.sql(LOWERING)]
    assert collations
    for name in collations:
        numbers = "generate_series(1, 1114111) as n where n not between 55296 and 57343"
        asked = f'select l from (select chr(n) from {numbers}) as t (l) where lower(l collate "{name}") <> l'
        changed = {letter for (letter,) in operated.sql(asked)}
        assert len(changed) > 1_000
        assert not changed & own


def test_a_key_of_citext_is_one_with_a_row_that_the_table_has_in_another_case(operated: Operated) -> None:
    operated.sql(MOOD)
    operated.sql(f"{MAP.format('citext')}; insert into keyed values ('Ann@a.org', 5)")
    operated.put(json.dumps(["ann@a.org", 7]).encode())
    operated.run(topology(operated, "fold"))
    assert operated.sql("select k, v from keyed") == [("Ann@a.org", 12)]
    assert operated.command("audit", "verify", NAME, "--deep", status=4)["violations"] == []


@pytest.mark.parametrize("mode", ["upsert", "fold", "map"])
def test_a_key_of_citext_outside_of_the_search_path_is_refused(operated: Operated, mode: str) -> None:
    operated.sql("create schema aside; create extension citext schema aside")
    operated.sql(MAP.format("aside.citext"))
    with pytest.raises(SinkRefused, match=r"'k' is aside\.citext in the table and text in the"):
        operated.run(topology(operated, mode))


@pytest.mark.parametrize("kind", ["cidr", "interval"])
def test_a_map_with_such_a_key_is_refused(operated: Operated, kind: str) -> None:
    operated.sql(MAP.format(kind))
    with pytest.raises(SinkRefused, match=r"'k' is .* in the table and text in the"):
        operated.run(topology(operated, "map"))


VALUES = {
    ("decimal(9,2)", "numeric"): {"1.0": "1.00", "1.00": "1.00", "1": "1.00", "-2.50": "-2.50", "-2.5": "-2.50"},
    ("decimal(9,2)", "numeric(12,4)"): {"1.0": "1.0000", "1.00": "1.0000", "2": "2.0000"},
    ("timestamp", "timestamptz"): {
        "2026-01-31T12:30:00+00:00": "2026-01-31 12:30:00+00",
        "2026-01-31T14:30:00+02:00": "2026-01-31 12:30:00+00",
        "2026-01-31T12:30:00+02:00": "2026-01-31 10:30:00+00",
    },
    ("timestamp_ntz", "timestamp"): {
        "2026-01-31T12:30:00": "2026-01-31 12:30:00",
        "2026-01-31T12:30:00.5": "2026-01-31 12:30:00.5",
    },
}
"""The stream's type and the table's: texts that make a key, and the key that the table shows."""


def valued(line: str) -> tuple[Decimal | datetime, int]:
    key, number = json.loads(line)
    return (datetime.fromisoformat(key) if "T" in key else Decimal(key)), number


@pytest.mark.parametrize("mode", ["upsert", "fold", "map"])
@pytest.mark.parametrize("kinds", VALUES, ids=lambda kinds: kinds[1])
def test_a_key_of_a_number_or_a_time_is_compared_by_its_value(
    operated: Operated, kinds: tuple[str, str], mode: str
) -> None:
    operated.sql("alter role current_user set timezone = 'UTC'")
    operated.sql(MAP.format(kinds[1]) if mode == "map" else f"create table keyed (k {kinds[1]} primary key, v bigint)")
    lines = [json.dumps([text, number]).encode() for number, text in enumerate([*VALUES[kinds]] * 3)]
    for cut in (lines[:4], lines[4:]):
        operated.put(*cut)
        operated.run(topology(operated, mode, kinds[0], valued))
    expected: dict[str, list[int]] = {}
    for number, key in enumerate([*VALUES[kinds].values()] * 3):
        expected.setdefault(key, []).append(number)
    last = max if mode == "upsert" else sum
    assert dict(operated.sql("select k::text, v from keyed")) == {key: last(found) for key, found in expected.items()}
    assert operated.command("audit", "verify", NAME, "--deep", status=4 if mode == "upsert" else 0)["violations"] == []
