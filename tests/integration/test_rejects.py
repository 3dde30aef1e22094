"""Rejects: a row that a table refuses fails its one message at that sink; all others are applied, and all is on record."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from support.crashes import KILLED, run_driver
from support.operated import Operated
from support.rejecting import BAD, NAME, PLAIN, STRICT, build, words_of

from stormproof.core.base.errors import SinkRefused
from stormproof.core.base.failpoint import FAILPOINTS
from stormproof.core.base.message import Guarantee
from stormproof.trident.ledger import sink_records

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]

LINES = [b"a b", b"bad c", b"d", b"", b"e bad bad f", b"g h", b"i", b"j", b"k l", b"m"]

_FUNCTION = (
    "create function no() returns trigger language plpgsql as"
    " 'begin if new.word = ''bad'' then {}; end if; return new; end';"
    "create trigger t before insert on strict_words for each row execute function no()"
)
RULES: dict[str, str] = {
    "23514": "alter table strict_words add check (word <> 'bad')",
    "23503": "create table known (word text primary key);"
    "insert into known select chr(96 + n) from generate_series(1, 26) n;"
    "alter table strict_words add foreign key (word) references known deferrable initially deferred",
    "P0001": _FUNCTION.format("raise exception ''not this''"),
    "22012": _FUNCTION.format("new.word = (1 / 0)::text"),
    "54000": "create index on strict_words (word);"
    + _FUNCTION.format("new.word = (select string_agg(md5(n::text), '''') from generate_series(1, 400) n)"),
}


@pytest.fixture
def rejecting(operated: Operated) -> Operated:
    operated = replace(operated, cell=replace(operated.cell, name=NAME, build=build, mode=None, batch_messages=100))
    operated.run(build(operated.cell))  # makes the tables
    return operated


def run(rejecting: Operated) -> Any:
    return rejecting.run(build(rejecting.cell))


def words(rejecting: Operated, table: str) -> Counter[str]:
    return Counter(word for (word,) in rejecting.sql(f"select word from {table}"))


@pytest.mark.parametrize("sqlstate", RULES)
def test_a_refused_row_fails_its_message_at_that_sink_alone(rejecting: Operated, sqlstate: str) -> None:
    rejecting.sql(RULES[sqlstate])
    rejecting.put(*LINES)
    ran = run(rejecting)
    assert (ran.rejected, ran.messages, ran.failed) == (2, 8, 0)
    assert words(rejecting, STRICT) == words_of(LINES, {BAD})
    assert words(rejecting, PLAIN) == words_of(LINES)
    found = rejecting.sql("select sink, rows, sqlstate, payload, state from stormproof.reject order by number")
    assert found == [("strict", 2, sqlstate, b"bad c", "open"), ("strict", 4, sqlstate, b"e bad bad f", "open")]
    assert rejecting.kinds("notices", rejecting.verify()) == ["rejected"]


OWN = {
    "a sequence has ended": (
        "alter table strict_words add id int generated always as identity (maxvalue 3)",
        "reached maximum value of sequence",
        "alter table strict_words alter id set maxvalue 99",
    ),
    "a sequence is behind": (
        "alter table strict_words add id serial primary key; insert into strict_words "
        "select 'old', generate_series(2, 60)",
        r"Key \(id\)=\(\d+\) already exists.*value is the table's own",
        "select setval('strict_words_id_seq', 60)",
    ),
}


def test_a_partition_that_is_missing_for_a_default_is_no_messages_fault(rejecting: Operated) -> None:
    rejecting.sql(
        "drop table plain_words; create table plain_words (word text, at timestamptz default now()) partition by range (at);"
        "create table before partition of plain_words for values from (minvalue) to ('2020-01-01')"
    )
    rejecting.command("ledger", "adopt-table", NAME, "plain")
    rejecting.put(b"a b")
    with pytest.raises(
        SinkRefused, match=r"no partition .* found for row .* value is the table's own\. Make the partition"
    ):
        run(rejecting)
    rejecting.sql("create table later partition of plain_words default")
    rejecting.command("retry", NAME, "1")
    run(rejecting)
    assert words(rejecting, PLAIN) == words_of([b"a b"])


@pytest.mark.parametrize("strict", [False, True], ids=["alone", "and a row that the table refuses"])
@pytest.mark.parametrize("what", OWN)
def test_for_what_the_table_itself_puts_into_a_row_no_message_is_to_blame(
    rejecting: Operated, what: str, strict: bool
) -> None:
    rule, said, repair = OWN[what]
    rejecting.sql(rule + (f"; {RULES['23514']}" if strict else ""))
    lines = LINES[:4] if strict else [line for line in LINES if BAD.encode() not in line]
    rejecting.put(*lines)
    with pytest.raises(SinkRefused, match=said):
        run(rejecting)
    assert rejecting.sql("select count(*) from stormproof.reject") == [(0,)]
    rejecting.sql(repair)
    rejecting.command("retry", NAME, "1")
    run(rejecting)
    rejecting.sql("delete from strict_words where word = 'old'")
    assert words(rejecting, STRICT) == words_of(lines, {BAD})


def test_control_a_value_that_the_stream_gives_is_the_messages_fault(rejecting: Operated) -> None:
    rejecting.sql("alter table strict_words add id serial, add unique (word)")
    rejecting.put(b"a b", b"c", b"a")
    assert run(rejecting).rejected == 1


def test_a_row_waits_for_its_parent_in_the_other_half_of_its_batch(rejecting: Operated) -> None:
    """The table has a foreign key to itself: each word but `z` needs the one behind it, and the batch has them backwards."""
    rejecting.sql(
        "alter table strict_words add unique (word), add parent text generated always as"
        " (case when word < 'z' and length(word) = 1 then chr(ascii(word) + 1) when word like '%y' then 'bad' end) stored,"
        " add foreign key (parent) references strict_words (word), add check (word <> 'bad')"
    )
    lines = [*(chr(n).encode() for n in range(ord("p"), ord("z") + 1)), b"bad", b"baddy", b"baddy"[:0]]
    rejecting.put(*lines)
    assert run(rejecting).rejected == 2  # the word that is refused, and the one that needs it
    assert words(rejecting, STRICT) == words_of(lines, {BAD, "baddy"})
    found = rejecting.sql("select sqlstate, payload from stormproof.reject order by number")
    assert found == [("23514", b"bad"), ("23503", b"baddy")]
    rejecting.verify()


def test_a_limit_stops_the_topology_instead_of_rejecting_the_stream(rejecting: Operated) -> None:
    """More than ten messages and more than a tenth of the newest: the batch is blocked, and nothing of it is applied."""
    rejecting.sql("alter table strict_words add check (word <> 'bad')")
    lines = [b"good"] * 19 + [b"bad"] * 11
    rejecting.put(*lines)
    with pytest.raises(SinkRefused, match="more than 10 messages") as caught:
        run(rejecting)
    assert caught.value.details["problem"] == "too_many_rejects"
    assert words(rejecting, STRICT) == Counter()
    assert rejecting.sql("select state, cause from stormproof.txn where txid = 1") == [("blocked", "too_many_rejects")]
    assert rejecting.sql("select count(*) from stormproof.reject") == [(0,)]
    rejecting.command("ledger", "skip", NAME, "1", "strict", "--rows", "--by", "Ada", "--why", "known")
    assert run(rejecting).rejected == 11
    assert words(rejecting, STRICT) == words_of(lines, {BAD})
    rejecting.verify()


def test_every_refused_row_blocks_where_nothing_may_be_rejected(
    rejecting: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORMPROOF_REJECTS_MAX_SHARE", "0")
    rejecting.sql("alter table strict_words add check (word <> 'bad')")
    rejecting.put(*LINES)
    with pytest.raises(SinkRefused, match="check constraint"):
        run(rejecting)
    assert words(rejecting, STRICT) == Counter()


def test_a_missing_column_is_the_operators(rejecting: Operated) -> None:
    rejecting.sql("alter table strict_words rename column word to other")
    rejecting.put(*LINES)
    with pytest.raises(SinkRefused, match="no column 'word'"):
        run(rejecting)
    assert rejecting.sql("select count(*) from stormproof.reject") == [(0,)]


POINTS = [p.name for p in FAILPOINTS.values() if p.scope in ("every", "postgres", "reject", "recovery")]
"""Among them postgres.after_rejects."""


def test_rejects_are_recorded_once_wherever_a_driver_dies(rejecting: Operated) -> None:
    """Each start dies at another place, with a batch that has rejects; the last one runs to the end."""
    rejecting = replace(rejecting, cell=replace(rejecting.cell, rejects_max_share=1.0))
    rejecting.sql("alter table strict_words add check (word <> 'bad')")
    lines: list[bytes] = []
    died = 0
    for number, point in enumerate(POINTS):
        more = [b"a%d" % number, b"bad b%d" % number, b"c%d c%d" % (number, number)]
        rejecting.put(*more)
        lines += more
        died += run_driver(rejecting.cell, f"{point}=kill") == KILLED
    assert died > len(POINTS) - 4  # recovery may have found nothing to do
    assert run_driver(rejecting.cell) == 0
    assert words(rejecting, STRICT) == words_of(lines, {BAD})
    assert words(rejecting, PLAIN) == words_of(lines)
    found = rejecting.sql("select payload from stormproof.reject order by number")
    assert [bytes(payload) for (payload,) in found] == [line for line in lines if BAD.encode() in line]
    rejecting.verify()


@pytest.mark.parametrize(
    ("statement", "kind"),
    [
        ("delete from stormproof.reject where number = (select min(number) from stormproof.reject)", "rejects_differ"),
        ("update stormproof.txn set rejected = 1 where rejected = 2", "counts"),
        ("delete from stormproof_sink.reject", "evidence_differs"),
        ("update stormproof.reject set state = 'retrying', decided_by = 'x', decided_at = now()", "message_lost"),
    ],
)
def test_control_what_is_not_on_record_is_a_violation(rejecting: Operated, statement: str, kind: str) -> None:
    rejecting.sql("alter table strict_words add check (word <> 'bad')")
    rejecting.put(*LINES)
    run(rejecting)
    rejecting.sql(statement)
    assert kind in rejecting.kinds("violations", rejecting.verify(status=1))


# -- what operators decide ---------------------------------------------------------------------------------------------


def rejected(rejecting: Operated, *filters: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = rejecting.command("dead-letters", "list", NAME, "--decided", *filters)["dead_letters"]
    return found


def test_a_retried_reject_goes_only_to_the_sink_that_rejected_it(rejecting: Operated) -> None:
    """A retry beside failed messages: a slice that mixes them is opened in parts."""
    rejecting.sql("alter table strict_words add constraint rule check (word <> 'bad')")
    rejecting.put(*LINES)
    run(rejecting)
    first, second = (one["id"] for one in rejected(rejecting))
    done = rejecting.command("dead-letters", "requeue", NAME, first, "--by", "ann", "--why", "mended")
    assert (done["requeued"], done["at_sinks"]) == ([first], [{"id": first, "sink": "strict", "txid": 1}])
    rejecting.verify()  # it waits, and stands in one place
    again = run(rejecting)  # the table refuses it still
    assert (again.rejected, again.messages, again.replayed) == (1, 0, 1)
    assert [
        (one["disposal"], one["txid"], one["requeued_in"]) for one in rejected(rejecting) if one["id"] == first
    ] == [
        ("requeue", 1, 2),
        (None, 2, None),
    ]
    rejecting.verify()
    rejecting.sql("alter table strict_words drop constraint rule")
    rejecting.command("dead-letters", "requeue", NAME, "--error-class", "23", "--yes")
    assert run(rejecting).messages == 2
    assert words(rejecting, STRICT) == words(rejecting, PLAIN) == words_of(LINES)
    assert {one["disposal"] for one in rejected(rejecting)} == {"requeue"}
    assert rejecting.verify()["violations"] == []
    report = rejecting.command("audit", "message", NAME, first)
    assert (report["end"]["kind"], [one["txid"] for one in report["openings"]]) == ("committed", [1, 2, 3])
    shown = rejecting.command("dead-letters", "show", NAME, second)
    assert (shown["text"], len(shown["at_sinks"])) == ("e bad bad f", 1)


def test_what_a_sink_rejected_is_listed_and_chosen_as_any_dead_letter(rejecting: Operated) -> None:
    rejecting.sql("alter table strict_words add constraint rule check (word <> 'bad')")
    rejecting.put(*LINES)
    run(rejecting)
    ids = [one["id"] for one in rejected(rejecting)]
    for chosen in (("--match", "rule"), ("--component", "strict"), ("--reason", "refused"), ("--error-class", "23514")):
        assert [one["id"] for one in rejected(rejecting, *chosen)] == ids, chosen
    for other in (("--match", "r_le"), ("--sink", "plain"), ("--source", "none"), ("--until", "1h"), ("--last", "0")):
        assert rejected(rejecting, *other) == [], other
    assert rejecting.command("dead-letters", "list", "--count")["classes"] == [
        {
            "topology": NAME,
            "error_class": "23514",
            "reason": "refused",
            "component": "strict",
            "undecided": len(ids),
            "decided": 0,
        }
    ]
    assert rejecting.command("dead-letters", "drop", NAME, ids[0], "--sink", "plain", status=1)["not_dead"] == ids[:1]
    counted = rejecting.command("dead-letters", "drop", NAME, ids[0], "--sink", "strict", "--dry-run")
    assert counted["would_drop"] == ids[:1]
    refused = rejecting.command("dead-letters", "edit", NAME, ids[0], "--payload", "none", status=2)
    assert "was rejected by strict alone: the other sinks hold it as it is" in refused["error"]["message"]
    text = rejecting.text("dead-letters", "show", NAME, ids[0])
    assert "rejected by sink strict in txid 1, SQLSTATE 23514" in text
    assert "dead-letters edit" not in text


def test_retries_for_other_sinks_do_not_scatter_those_for_one(rejecting: Operated) -> None:
    """Of a slice of retries for several sets of sinks, the most frequent one stays together."""
    for table, word in ((STRICT, BAD), (PLAIN, "d")):
        rejecting.sql(f"alter table {table} add constraint rule check (word <> '{word}')")
    lines = [*LINES, b"bad n"]
    rejecting.put(*lines)
    assert run(rejecting).rejected == 4
    for table in (STRICT, PLAIN):
        rejecting.sql(f"alter table {table} drop constraint rule")
    rejecting.command("dead-letters", "requeue", NAME, "--all")
    again = run(rejecting)
    assert (again.batches, again.messages) == (3, 4)  # one behind the other, with that of the other sink between them
    assert words(rejecting, STRICT) == words(rejecting, PLAIN) == words_of(lines)
    rejecting.verify()


def test_a_reject_is_not_opened_again_under_at_most_once(rejecting: Operated) -> None:
    """A message is confirmed as it is opened, and with that its retry is gone before it is read."""
    rejecting = replace(rejecting, cell=replace(rejecting.cell, guarantee=Guarantee.AT_MOST_ONCE))
    rejecting.sql("alter table strict_words add constraint rule check (word <> 'bad')")
    rejecting.put(*LINES)
    run(rejecting)
    first, second = (one["id"] for one in rejected(rejecting))
    rejecting.sql("alter table strict_words drop constraint rule")
    done = rejecting.command("dead-letters", "requeue", NAME, first, status=1)
    assert done["requeued"] == []
    assert "at-most-once" in done["refused"][first]
    run(rejecting)
    assert {one["disposal"] for one in rejected(rejecting)} == {None}
    rejecting.command("dead-letters", "drop", NAME, first, second)
    rejecting.verify()


def test_a_dropped_reject_stays_on_record(rejecting: Operated) -> None:
    rejecting.sql("alter table strict_words add check (word <> 'bad')")
    rejecting.put(*LINES)
    run(rejecting)
    first, second = (one["id"] for one in rejected(rejecting))
    rejecting.command("dead-letters", "drop", NAME, first, "--by", "ann", "--why", "a test")
    rejecting.command("dead-letters", "requeue", NAME, first, status=1)  # decided
    assert [one["id"] for one in rejecting.command("dead-letters", "list", NAME)["dead_letters"]] == [second]
    report = rejecting.command("audit", "message", NAME, first)
    assert (report["end"]["kind"], report["end"]["by"]) == ("dropped", "ann")
    assert rejecting.command("audit", "message", NAME, second)["end"]["kind"] == "rejected"
    assert rejecting.command("status", NAME)["topologies"][0]["rejects"] == {"dropped": 1, "open": 1}
    assert rejected(rejecting, "--error-class", "22") == []
    assert len(rejected(rejecting, "--first", "1", "--last", "1", "--sink", "strict", "--since", "1h")) == 2
    rejecting.verify()


def test_a_retry_is_applied_once_wherever_a_driver_dies(rejecting: Operated) -> None:
    """One reject is retried before each start; each start dies at another place; the last one runs to the end."""
    rejecting.sql("alter table strict_words add constraint rule check (word <> 'bad')")
    lines = [b"bad b%d" % number for number in range(len(POINTS))] + [b"good"] * 20
    rejecting.put(*lines)
    assert run_driver(replace(rejecting.cell, rejects_max_share=1.0)) == 0
    found = [one["id"] for one in rejected(rejecting)]
    assert len(found) == len(POINTS)
    rejecting.sql("alter table strict_words drop constraint rule")
    for point, message in zip(POINTS, found, strict=True):
        rejecting.command("dead-letters", "requeue", NAME, message)
        run_driver(rejecting.cell, f"{point}=kill")
    assert run_driver(rejecting.cell) == 0
    assert words(rejecting, STRICT) == words(rejecting, PLAIN) == words_of(lines)
    rejecting.verify()


def test_control_a_retry_for_every_sink_is_seen(rejecting: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a batch of retried rejects is not limited to the sinks that rejected them, the others have them twice."""
    rejecting.sql("alter table strict_words add constraint rule check (word <> 'bad')")
    rejecting.put(*LINES)
    run(rejecting)
    rejecting.sql("alter table strict_words drop constraint rule")
    rejecting.command("dead-letters", "requeue", NAME, "--all")
    monkeypatch.setattr(sink_records, "retrying", lambda *_: {})
    run(rejecting)
    assert words(rejecting, PLAIN) != words_of(LINES)
    assert "message_lost" in rejecting.kinds("violations", rejecting.verify(status=1))
