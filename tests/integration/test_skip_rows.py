"""`ledger skip --rows`: a table that refuses some rows of a batch gets all the others, and each refused one is on record."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.command_line import CommandLine
from support.contents import content
from support.operated import Operated
from support.topologies import SinkMode, expected, messages, table_of

from stormproof.core.base.errors import SinkRefused
from stormproof.core.postgres import embedded
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.sinks.postgres import session

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]

NAME = "rows"
APPEND, FOLD = SinkMode.POSTGRES_APPEND, SinkMode.POSTGRES_FOLD


@pytest.fixture(autouse=True)
def every_refused_row_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORMPROOF_REJECTS_MAX_SHARE", "0")


def held(operated: Operated, mode: SinkMode) -> Counter[str]:
    return content(mode, NAME, operated.cell.folder, operated.cell.database)


def blocked(operated: Operated, mode: SinkMode, rule: str) -> None:
    """A table has a rule that some rows of txid 1 break."""
    operated.run()  # makes the tables
    operated.sql(rule.format(table=table_of(mode, NAME)))
    operated.put(*messages(9))
    for _ in range(2):  # when it is refused, and at each start from then on
        with pytest.raises(SinkRefused, match=rf"ledger skip rows 1 {mode} \(with --rows: only those") as caught:
            operated.run()
        assert (caught.value.details["txid"], caught.value.details["sink"]) == (1, mode)


def alone(operated: Operated, mode: SinkMode) -> Operated:
    """The same with one sink."""
    return replace(operated, cell=replace(operated.cell, mode=mode))


def skipped(operated: Operated, mode: SinkMode) -> list[dict[str, str]]:
    report = operated.command("ledger", "skip", NAME, "1", mode, "--rows", "--by", "Ada", "--why", "known")
    assert report["rows"] + len(report["refused"]) > 0
    refused: list[dict[str, str]] = report["refused"]
    return refused


RULES = [
    ("alter table {table} add check (word <> 'm1')", "23514"),
    ("alter table {table} add unique (word) deferrable initially deferred", "23505"),
    (
        "create function no() returns trigger language plpgsql as"
        " 'begin if new.word = ''m1'' then raise exception ''not m1''; end if; return new; end';"
        "create trigger t before insert on {table} for each row execute function no()",
        "P0001",
    ),
]


@pytest.mark.parametrize(("rule", "sqlstate"), RULES)
def test_only_the_rows_that_a_table_refuses_are_given_up(operated: Operated, rule: str, sqlstate: str | None) -> None:
    sinks = set(SinkMode) if sqlstate == "23514" else {APPEND}  # the others are not touched by the rule's kind
    operated = operated if len(sinks) > 1 else alone(operated, APPEND)
    blocked(operated, APPEND, rule)
    refused = skipped(operated, APPEND)
    assert refused
    assert {row["sqlstate"] for row in refused} == {sqlstate}
    given_up = Counter(json.loads(row["text"])["word"] for row in refused)
    operated.sql(f"alter table {table_of(APPEND, NAME)} disable trigger user")
    if sqlstate == "23505":
        operated.sql(f"alter table {table_of(APPEND, NAME)} drop constraint rows_postgres_append_word_key")
    operated.run()
    should = expected(messages(9))
    assert held(operated, APPEND) == should - given_up
    for mode in sinks - {APPEND}:
        assert held(operated, mode) == should, mode
    assert operated.sql("select sum(rows), min(sqlstate) from stormproof.reject") == [(len(refused), sqlstate)]
    verified = operated.verify()
    (notice,) = [n for n in verified["notices"] if n["kind"] == "skipped"]
    assert f"{len(refused)} of its rows were given up by Ada" in notice["text"]


def test_a_fold_gives_up_the_keys_that_its_table_refuses(operated: Operated) -> None:
    operated = alone(operated, FOLD)
    blocked(operated, FOLD, "alter table {table} add check (word <> 'm1')")
    refused = skipped(operated, FOLD)
    assert [json.loads(row["text"]) for row in refused] == [{"word": "m1", "n": 2}]
    operated.sql(f"alter table {table_of(FOLD, NAME)} drop constraint rows_postgres_fold_word_check")
    operated.run()
    should = expected(messages(9))
    assert held(operated, FOLD) == should - Counter(m1=2)
    operated.verify()


def test_rows_that_a_trigger_drops_are_no_refused_ones(operated: Operated) -> None:
    operated = alone(operated, APPEND)
    drops = (
        "create function gone() returns trigger language plpgsql as"
        " 'begin if new.word = ''m2'' then return null; end if; return new; end';"
        "create trigger t before insert on {table} for each row execute function gone();"
    )
    blocked(operated, APPEND, drops + RULES[0][0])
    report = operated.command("ledger", "skip", NAME, "1", APPEND, "--rows", "--by", "Ada", "--why", "known")
    assert {json.loads(row["text"])["word"] for row in report["refused"] if not row["goes_with_others"]} == {"m1"}
    assert (report["dropped"], report["rows"]) == (2, held(operated, APPEND).total())
    operated.run()
    operated.verify()


def test_a_command_that_is_killed_behind_the_sinks_commit_is_called_again(
    operated: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stormproof.trident.cli.options import opened
    from stormproof.trident.decisions import skips

    operated = alone(operated, APPEND)
    blocked(operated, APPEND, RULES[0][0])

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(skips, "unblock", die)
        with pytest.raises(KeyboardInterrupt), opened() as stores:
            skips.skip_rows(stores, NAME, 1, APPEND, by="Ada", why="")
    assert "given up by Ada" in str(operated.verify()["notices"])
    refused = skipped(operated, APPEND)
    operated.run()
    assert len(refused) == operated.sql("select sum(rows) from stormproof.reject")[0][0] > 0
    operated.verify()


def test_too_many_refused_rows_give_up_none(operated: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    operated = alone(operated, APPEND)
    blocked(operated, APPEND, "alter table {table} add check (word = 'none')")
    monkeypatch.setattr(session, "REFUSED_MAX", 2)
    said = operated.command("ledger", "skip", NAME, "1", APPEND, "--rows", status=1)["error"]["message"]
    assert "the rows of more than 2 messages" in said
    assert "Nothing was written" in said
    assert held(operated, APPEND) == Counter()
    assert operated.sql("select state from stormproof.txn where txid = 1") == [("blocked",)]


def test_what_is_no_rows_fault_is_not_taken_for_it(operated: Operated) -> None:
    blocked(operated, APPEND, RULES[0][0])
    operated.sql(f"alter table {table_of(APPEND, NAME)} rename column word to other")
    said = operated.command("ledger", "skip", NAME, "1", APPEND, "--rows", status=1)["error"]["message"]
    assert "no column 'word'" in said
    delta = operated.command("ledger", "skip", NAME, "1", SinkMode.DELTA_FOLD, "--rows", status=2)["error"]["message"]
    assert "no Postgres table" in delta


def test_control_a_reject_that_the_ledger_forgets_is_a_violation(operated: Operated) -> None:
    operated = alone(operated, APPEND)
    blocked(operated, APPEND, RULES[0][0])
    skipped(operated, APPEND)
    operated.run()
    operated.sql("delete from stormproof.reject")
    assert "rejects_differ" in operated.kinds("violations", operated.verify(status=1))


def test_doctor_and_explain_say_what_can_refuse_rows(operated: Operated, tmp_path: Path) -> None:
    operated = alone(operated, APPEND)
    operated.run()
    ended = CommandLine(operated.capture).ended
    file = tmp_path / "refusing.py"
    file.write_text(
        "from stormproof import PostgresQueue, PostgresSink, Topology\n"
        "topology = Topology('other')\n"
        "lines = topology.stream('lines', PostgresQueue('lines', schema='word string'))\n"
        f"lines.into(PostgresSink({table_of(APPEND, NAME)!r}))\n"
    )
    assert "can refuse rows" not in ended("doctor", "--no-spark", "--json")[1]
    assert "can refuse rows" not in "".join(map(str, ended("explain", f"{file}:topology", "--json")))
    operated.sql(f"alter table {table_of(APPEND, NAME)} add constraint no_m1 check (word <> 'm1')")
    checks = {check["name"]: check for check in json.loads(ended("doctor", "--no-spark", "--json")[1])["checks"]}
    assert checks["tables"]["ok"]
    assert "CHECK no_m1" in checks["tables"]["found"]
    assert "what the table checks" in checks["tables"]["advice"]
    status, _, noted = ended("explain", f"{file}:topology", "--json")
    assert (status, "CHECK no_m1" in noted) == (0, True)


def test_doctor_warns_of_a_server_whose_crash_may_lose_what_was_committed(
    operated: Operated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def found() -> dict[str, Any]:
        checks = json.loads(CommandLine(capsys).ended("doctor", "--no-spark", "--json")[1])["checks"]
        return next(check for check in checks if check["name"] == "durability")

    well = found()
    assert (well["ok"], well["found"], well["advice"]) == (True, "on", None)
    for name in ("fsync", "full_page_writes"):
        monkeypatch.setitem(embedded._SERVER_SETTINGS, name, "off")  # pyright: ignore[reportPrivateUsage]
    server = EmbeddedPostgres(tmp_path / "server")
    server.acquire()
    try:
        monkeypatch.setenv("STORMPROOF_DATABASE_URL", server.database.adbc_uri)
        risky = found()
    finally:
        server.release()
    assert risky["ok"]
    assert risky["advice"] is not None
    assert "fsync is off" in risky["found"]
    assert "full_page_writes is off" in risky["found"]
