"""docs/sinks.md, "Types that a stream has not": each text of its table through a topology, into each type of Postgres."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from support.operated import Operated

from stormproof import PostgresQueue, PostgresSink, Topology
from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.schema import parse_schema
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.contract.protocol import SinkIdentity
from stormproof.sinks.postgres.columns import FORMS

pytestmark = pytest.mark.postgres

NAME = "texts"
PAGE = (Path(__file__).parents[2] / "docs" / "sinks.md").read_text()
FURTHER = """\
| `macaddr8` | `08:00:2b:01:02:03:04:05` | `08:00:2b:01:02:03:04:05` | yes | `08:00` |
| `bit varying(3)` | `10` | `10` | yes | `1010` |
| `int8range` | `[1,)` | `[1,)` | yes | `[3,1]` |
| `int4multirange` | `{[1,3),[2,5)}` | `{[1,5)}` | yes | `[1,3)` |
| `int8multirange` | `{}` | `{}` | yes | `[1,3)` |
| `nummultirange` | `{[1.5,2)}` | `{[1.5,2)}` | no | `[1,2)` |
| `datemultirange` | `{[2026-01-31,2026-02-02)}` | `{[2026-01-31,2026-02-02)}` | yes | `{[now,)}` |
| `tsmultirange` | `{[2026-01-31 12:30,)}` | `{["2026-01-31 12:30:00",)}` | yes | `{[now,)}` |
| `tstzmultirange` | `{[2026-01-31 12:30:00+02,)}` | `{["2026-01-31 10:30:00+00",)}` | no | `{[now,)}` |
"""
"""Rows of types that the page only names as the like of others."""
TABLE = PAGE.partition("<!-- postgres texts -->\n")[2].partition("\n\n")[0].splitlines()[2:] + FURTHER.splitlines()
ROWS = [[re.findall(r"`([^`]*)`", cell) or [cell.strip()] for cell in line.strip("|").split("|")] for line in TABLE]
TYPES = {row[0][0]: row for row in ROWS}
OF_OURS = (
    "create extension ltree; create extension citext; create type mood as enum ('sad', 'ok'); "
    "create type pair as (n int, t text); create domain address as inet"
)
NAMES = {"time": "time without time zone", "timetz": "time with time zone", "bit": "bit", "bit varying": "bit varying"}


def texts_of(operated: Operated, values: list[tuple[int, str, list[str]]], suffix: str) -> dict[str, list[str]]:
    """What the table's columns give back of these: column, type, texts; each text is a message."""
    columns = [f"c{number}" for number, _, _ in values]
    made = ", ".join(f"c{number} {kind}{suffix}" for number, kind, _ in values)
    operated.sql(f"create table texts (at bigint, {made})")
    messages = [(f"c{number}", text) for number, _, found in values for text in found]
    lines = [json.dumps([at, column, text]).encode() for at, (column, text) in enumerate(messages)]
    kind, wrap = ("array<string>", lambda text: [text, None]) if suffix else ("string", lambda text: text)

    def row(line: str) -> dict[str, object]:
        at, column, text = json.loads(line)
        return {**dict.fromkeys(columns), "at": at, column: wrap(text)}

    queue = PostgresQueue(NAME, schema="line string", database=operated.cell.database, max_attempts=1)
    topology = Topology(NAME)
    schema = ", ".join(["at long", *(f"{column} {kind}" for column in columns)])
    topology.stream("lines", queue).map(row, "line", schema=schema).into(PostgresSink("texts", name="pg"))
    operated.put(*lines)
    operated.run(topology, rejects_max_share=1.0)
    first = "[1]" if suffix else ""
    asked = "select format('%s', c{0}{1}) from texts where c{0} is distinct from null order by at"
    return {kind: [text for (text,) in operated.sql(asked.format(number, first))] for number, kind, _ in values}


@pytest.mark.parametrize("suffix", ["", "[]"], ids=["text", "array"])
def test_each_text_of_the_page_comes_back_as_it_says_and_the_others_fail_their_messages_alone(
    operated: Operated, suffix: str
) -> None:
    operated.sql(OF_OURS)
    operated.sql("alter role current_user set timezone = 'UTC'")
    # An array of a domain is none of the domain's type.
    kinds = [kind for kind in TYPES if not (suffix and kind == "address")]
    good = [(number, kind, [*TYPES[kind][1], *filter(None, TYPES[kind][4])]) for number, kind in enumerate(kinds)]
    assert texts_of(operated, good, suffix) == {kind: TYPES[kind][2] for kind in kinds}
    bad = sum(len([text for text in TYPES[kind][4] if text]) for kind in kinds)
    letters = operated.command("dead-letters", "list", NAME)["dead_letters"]
    assert len({one["id"] for one in letters}) == bad
    assert {one["sink"] for one in letters} == {None, "pg"}  # some fail in a task, the others at the commit
    found = operated.command("audit", "verify", NAME, "--deep", status=4)
    (table,) = found["tables"]
    assert (found["violations"], found["unknowns"]) == ([], [])
    assert "columns whose values the table keeps otherwise than they came: 'c0'" in str(table)


def test_a_key_may_be_what_the_page_says(operated: Operated) -> None:
    operated.sql(OF_OURS)
    found: dict[str, list[str]] = {}
    for number, kind in enumerate(TYPES):
        operated.sql(f"create table t{number} (k {kind} primary key, v bigint)")
        where = operated.cell
        sink = PostgresSink(
            f"t{number}",
            name=f"t{number}",
            mode="upsert",
            key="k",
            order_by="v",
            database=where.database,
            staging=where.folder,
        )
        input_ = SinkInput.for_upsert(parse_schema("k string, v long"), ("k",), ("v",))
        try:
            sink.open(SinkIdentity("keys", "life", sink.name), input_, 1).close()
            found[kind] = ["yes"]
        except SinkRefused as refused:
            found[kind] = ["no" if "key column 'k' is" in refused.message else refused.message]
    assert found == {kind: row[3] for kind, row in TYPES.items()}


@pytest.mark.parametrize(
    "kind", ["interval(3)", "interval day", "of_reals", "of_lengths", "of_scales", "of_times", "numeric(3,-1)", "money"]
)
def test_what_would_round_or_cut_a_text_that_nobody_can_check_before_is_refused(operated: Operated, kind: str) -> None:
    operated.sql(
        "create type of_reals as (x real); create type of_lengths as (x varchar(3)); "
        "create type of_scales as (x numeric(5,2));"
        "create type of_times as (x time)"
    )
    operated.sql(f"create table t (v {kind})")
    where = operated.cell
    sink = PostgresSink("t", name="t", database=where.database, staging=where.folder)
    with pytest.raises(SinkRefused, match=r"column 'v' is .* in the table and string in the rows"):
        sink.open(SinkIdentity("keys", "life", "t"), SinkInput(parse_schema("v string")), 1)


def test_the_page_has_each_type_that_takes_text() -> None:
    bases = {re.sub(r"\(.*\)", "", kind) for kind in TYPES} - {"mood", "pair", "address", "citext"}
    assert {NAMES.get(base, base) for base in bases} == {*FORMS}
