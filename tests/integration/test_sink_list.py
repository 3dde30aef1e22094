"""Sinks that join a topology later, leave it and come back: what they do not have is never passed over in silence."""

from __future__ import annotations

import logging
import re
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from support.crashes import Cell
from support.operated import Operated
from support.streams import SCHEMA, ArrowFrames, Handout
from support.topologies import MAX_ATTEMPTS

from stormproof import PostgresQueue, PostgresSink, Topology, count, exactly_once
from stormproof.core.base.errors import PositionMismatch
from stormproof.core.base.message import Guarantee
from stormproof.core.start.settings import Settings
from stormproof.trident.ledger.graphs import GraphChange
from stormproof.trident.ledger.missing import Missing

pytestmark = pytest.mark.postgres

NAME = "listed"


def words(operated: Operated, *sinks: str, key: str = "word") -> Topology:
    """Word counts into Postgres tables of these names."""
    t = Topology(NAME)
    queue = PostgresQueue(NAME, database=operated.cell.database, max_attempts=MAX_ATTEMPTS, backoff_base_s=0.001)
    grouped = t.stream("lines", queue).flat_map(str.split, "line", schema=f"{key} string").group_by(key)
    grouped.persistent_aggregate(n=count()).into(*(PostgresSink(sink, name=sink) for sink in sinks))
    return t


def feed(operated: Operated, line: str, *sinks: str) -> None:
    """One batch of this line through a topology with these sinks."""
    operated.put(line.encode())
    operated.run(words(operated, *sinks))


def counts(operated: Operated, table: str) -> Counter[str]:
    return Counter(dict(operated.sql(f"select word, n from {table}")))


def lacking(report: dict[str, Any]) -> list[tuple[str, int, int, int, int]]:
    """What a verify says that sinks do not have: sink, first, last, number, messages."""
    return [
        (n["sink"], n["txid"], n["last_txid"], n["txids"], n["messages"])
        for n in report["notices"]
        if n["kind"] == "sink_lacks"
    ]


def by_status(operated: Operated) -> list[tuple[str, int, int, int, int]]:
    (topology,) = operated.command("status")["topologies"]
    return [
        (sink["sink"], m["first"], m["last"], m["txids"], m["messages"])
        for sink in topology["sinks"]
        for m in sink["missing"]
    ]


def recorded(operated: Operated) -> list[tuple[str, str, Any]]:
    return operated.sql(
        "select reason, sink, detail -> 'missing' from stormproof.event where kind = 'graph' and sink is not null"
        " order by id"
    )


def test_a_sink_that_joins_later_says_what_it_does_not_have(
    operated: Operated, caplog: pytest.LogCaptureFixture
) -> None:
    feed(operated, "a b", "first")
    feed(operated, "a", "first")
    assert by_status(operated) == lacking(operated.verify()) == []
    caplog.set_level(logging.WARNING, "stormproof")
    feed(operated, "a c", "first", "second")
    assert counts(operated, "first") == Counter("aaabc")
    assert counts(operated, "second") == Counter("ac")  # the fold of what was committed while it was there
    said = "does not have 2 txids from 1 to 2 (2 messages)"
    assert [r.getMessage() for r in caplog.records if r.name == "stormproof.ledger"] == [
        f"topology {NAME}: sink 'second' is new, and {said}, committed before it joined"
    ]
    assert lacking(operated.verify()) == by_status(operated) == [("second", 1, 2, 2, 2)]
    assert f"note sink_lacks: sink 'second' {said}" in operated.text("audit", "verify", NAME)
    assert f"{NAME}: sink second {said}" in operated.text("status")
    assert recorded(operated) == [("sink_added", "second", {"first": 1, "last": 2, "txids": 2, "messages": 2})]
    # Nobody is told twice by the log; the audit and the status go on to say it.
    caplog.clear()
    feed(operated, "d", "first", "second")
    assert not [r for r in caplog.records if r.name == "stormproof.ledger"]
    assert lacking(operated.verify()) == by_status(operated) == [("second", 1, 2, 2, 2)]
    assert lacking(operated.command("audit", "verify", NAME, "--first", "3")) == []
    assert lacking(operated.command("audit", "verify", NAME, "--first", "2", "--last", "2")) == [("second", 1, 2, 2, 2)]


def test_a_sink_that_comes_back_behind_a_gap_needs_a_persons_word(
    operated: Operated, caplog: pytest.LogCaptureFixture
) -> None:
    feed(operated, "a", "first", "second")
    feed(operated, "b", "first")
    feed(operated, "b c", "first")
    notices = operated.verify()["notices"]
    assert [(n["kind"], n["sink"]) for n in notices] == [("sink_no_longer_written", "second")]
    operated.put(b"d")
    with pytest.raises(
        PositionMismatch,
        match=r"sink 'second' is back: it holds txid 1, the topology is at txid 3, and it does not have 2 txids from 2 to 3 "
        r"\(2 messages\).*would never come to it, and nothing was written.*accept-change listed (\w{12})$",
    ) as refused:
        operated.run(words(operated, "first", "second"))
    assert operated.command("status")["topologies"][0]["epoch"] == 3  # a refused start fences nobody
    fingerprint = refused.value.message.rpartition(" ")[2]
    operated.run(words(operated, "first"))  # and it may go on without it
    operated.command("ledger", "accept-change", NAME, fingerprint, "--by", "Ada", "--why", "copied by hand")
    caplog.set_level(logging.WARNING, "stormproof")
    operated.run(words(operated, "first", "second"))
    assert [r.getMessage() for r in caplog.records if "'second' is back" in r.getMessage()]
    assert counts(operated, "first") == Counter("abbcd")
    gap = [("second", 2, 4, 3, 3)]  # the batch of the run in between is in it
    assert lacking(operated.verify()) == by_status(operated) == gap
    assert counts(operated, "second") == Counter("a")
    feed(operated, "e", "first", "second")
    assert counts(operated, "second") == Counter("ae")
    assert lacking(operated.verify()) == by_status(operated) == gap
    assert recorded(operated)[-1] == (
        "sink_returned",
        "second",
        {"first": 2, "last": 4, "txids": 3, "messages": 3},
    )
    # Once accepted is not for ever: another gap needs another word.
    feed(operated, "f", "first")
    operated.put(b"g")
    with pytest.raises(PositionMismatch, match=r"does not have txid 6 \(1 message\)"):
        operated.run(words(operated, "first", "second"))


def test_a_sink_that_missed_nothing_comes_back_without_a_word(operated: Operated) -> None:
    feed(operated, "a", "first", "second")
    operated.run(words(operated, "first"))
    feed(operated, "b", "first", "second")
    assert counts(operated, "second") == counts(operated, "first") == Counter("ab")
    assert lacking(operated.verify()) == by_status(operated) == []
    assert recorded(operated) == [("sink_removed", "second", None)]  # no batch was without it: it was never away


def test_a_sink_that_comes_back_with_other_columns_is_held_to_what_it_was_given_last(operated: Operated) -> None:
    feed(operated, "a", "first", "second")
    operated.run(words(operated, "first"))
    operated.run(words(operated, "third"))
    with pytest.raises(PositionMismatch, match=r"sink 'second': column letter string was added.*accept-change"):
        operated.run(words(operated, "second", key="letter"))


def test_a_batch_that_was_prepared_without_the_sink_is_counted(
    operated: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is committed only by the start that the sink joins in, and to the others alone."""
    feed(operated, "a", "first")
    operated.put(b"b")
    operated.sql("alter table first add constraint not_b check (word <> 'b')")
    monkeypatch.setenv("STORMPROOF_REJECTS_MAX_SHARE", "0")  # no refused row is a reject
    with pytest.raises(Exception, match="is blocked"):
        operated.run(words(operated, "first"))
    operated.sql("alter table first drop constraint not_b")
    operated.command("retry", NAME, "2")
    operated.run(words(operated, "first", "second"))
    assert counts(operated, "first") == Counter("ab")
    assert not counts(operated, "second")
    assert lacking(operated.verify()) == by_status(operated) == [("second", 1, 2, 2, 2)]


def test_pruning_does_not_take_the_figures_away(operated: Operated) -> None:
    feed(operated, "a", "first", "second")
    feed(operated, "b", "first", "second")
    feed(operated, "c", "first", "second", "third")
    before = lacking(operated.verify())
    assert before == [("third", 1, 2, 2, 2)]
    feed(operated, "d", "first", "second", "third")
    operated.command("ledger", "prune", NAME, "--older-than", "0s")
    assert lacking(operated.verify()) == by_status(operated) == before
    # Nobody has counted what was pruned before a sink joined: that is said.
    feed(operated, "e", "first", "second", "third", "fourth")
    assert lacking(operated.verify())[0] == by_status(operated)[0] == ("fourth", 1, 4, 1, 1)
    assert "does not have txids 1 to 4 (up to 3 pruned and not counted, later ones: 1 of 1 message)" in operated.text(
        "status"
    )


def test_control_without_the_word_a_sink_comes_back_and_has_a_hole(
    operated: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GraphChange, "needs_acceptance", False)
    feed(operated, "a", "first", "second")
    feed(operated, "b", "first")
    feed(operated, "c", "first", "second")
    assert counts(operated, "second") == Counter("ac")
    assert lacking(operated.verify()) == [("second", 2, 2, 1, 1)]  # the audit says so all the same


@pytest.mark.parametrize("guarantee", list(Guarantee))
def test_under_every_guarantee(operated: Operated, guarantee: Guarantee) -> None:
    def run(line: str, *sinks: str) -> None:
        operated.put(line.encode())
        topology = words(operated, *sinks)
        topology.guarantee = guarantee
        Operated(
            Cell(NAME, None, guarantee, operated.cell.folder, operated.cell.database, NAME, 4), operated.capture
        ).run(topology)

    run("a", "first", "second")
    run("b", "first", "third")
    assert lacking(operated.verify()) == by_status(operated) == [("third", 1, 1, 1, 1)]
    with pytest.raises(PositionMismatch, match=r"'second' is back.*txid 2 \(1 message\)"):
        run("c", "first", "second")


def test_a_streaming_querys_sinks_are_treated_alike(operated: Operated) -> None:
    settings = Settings(
        database_url=operated.cell.database.sqlalchemy_url.render_as_string(hide_password=False),
        home=operated.cell.folder / "home",
    )

    def take(batch: int, *tables: str) -> None:
        sinks = [PostgresSink(table, name=table) for table in tables]
        function = exactly_once(*sinks, name=NAME, settings=settings, frames=ArrowFrames())
        try:
            function(Handout("query", lambda: pa.table([[str(batch)], ["id"]], schema=SCHEMA), SCHEMA), batch)
        finally:
            function.close()

    take(0, "first", "second")
    take(1, "first", "third")
    assert lacking(operated.verify()) == by_status(operated) == [("third", 1, 1, 1, 1)]
    with pytest.raises(PositionMismatch, match=r"'second' is back: it holds txid 1.*accept-change") as refused:
        take(2, "first", "second", "third")
    found = re.search(r"accept-change listed (\w{12})$", refused.value.message)
    assert found is not None
    operated.command("ledger", "accept-change", NAME, found[1])
    take(2, "first", "second", "third")
    assert operated.sql("select value from second order by 1") == [("0",), ("2",)]
    assert lacking(operated.verify()) == by_status(operated) == [("second", 2, 2, 1, 1), ("third", 1, 1, 1, 1)]


def test_what_is_kept_is_read_back() -> None:
    for missing in (Missing(1, 2, 2, 5), Missing(1, 9, 0, 0, 9)):
        assert Missing.of_json(missing.to_json()) == missing
    for nonsense in (None, 3, {}, {"first": 1}, {"first": "1", "last": 2, "txids": 1, "messages": 1}):
        assert Missing.of_json(nonsense) is None
