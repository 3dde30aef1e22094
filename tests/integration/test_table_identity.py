"""A sink's table that is gone, replaced, renamed or changed: nothing is made in its place, nothing is lost without a word.

Real Postgres, real Delta tables; appended rows, folds and maps.
"""

from __future__ import annotations

import re
from collections import Counter

import pytest
from support.kept import LINES, NAME, STORES, Kept, should
from support.operated import Operated

from stormproof.core.base.errors import FatalError, PositionMismatch, SinkRefused
from stormproof.core.base.failpoint import FailpointError, armed
from stormproof.core.contract.sink import SinkInput
from stormproof.sinks.contract.protocol import Sink, SinkIdentity, SinkSession
from stormproof.trident.decisions import adopt_table as adopt_module
from stormproof.trident.driver import opening
from stormproof.trident.ledger import sink_records
from stormproof.trident.ledger.sink_records import Bound
from stormproof.trident.ledger.tables import Run

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.5)]


@pytest.fixture(params=STORES)
def kept(request: pytest.FixtureRequest, operated: Operated) -> Kept:
    """After three batches."""
    made = Kept(request.param, operated)
    made.run(put=LINES)
    assert made.counts() == should(*LINES)
    return made


def refused(kept: Kept, says: str, *, table: str = "counts", error: type[FatalError] = PositionMismatch) -> str:
    with pytest.raises(error, match=says) as raised:
        kept.run(table)
    return str(raised.value)


only_postgres = pytest.mark.parametrize("kept", [s for s in STORES if s.startswith("postgres")], indirect=True)


# -- a table that is gone ------------------------------------------------------------------------------------------------


def test_a_table_that_is_gone_is_not_made_and_may_be_put_back(kept: Kept) -> None:
    kept.move("counts", "away")
    if kept.is_delta:
        kept.folder("counts").mkdir()  # where it was mounted
    kept.operated.put(b"c")
    for _ in range(2):
        text = refused(kept, rf"'s' of topology '{NAME}': the table \S*counts.* is gone.*holds txid 3 ")
        assert f"ledger adopt-table {NAME} s --accept-loss" in text
        assert not kept.is_there()
    (topology,) = kept.command("status")["topologies"]
    assert "is gone" in topology["refused"]["reason"]
    assert topology["refused"]["sink"] == "s"
    assert not kept.is_there()
    if kept.is_delta:
        kept.folder("counts").rmdir()
    kept.move("away", "counts")
    kept.run()
    assert kept.counts() == should(*LINES, b"c")
    kept.operated.verify()
    assert kept.command("status")["topologies"][0]["refused"] is None


def test_control_a_start_that_makes_what_is_gone_leaves_no_place_for_it(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    def always_makes(sink: Sink, input_: SinkInput, run: Run, bound: Bound | None) -> SinkSession:
        return sink.open(SinkIdentity(run.topology, run.incarnation, sink.name), input_, run.epoch)

    monkeypatch.setattr(opening, "open_bound", always_makes)
    kept.move("counts", "away")
    with pytest.raises(PositionMismatch):
        kept.run()
    assert kept.is_there()


def test_a_table_that_was_made_and_not_bound_is_found_by_the_next_start(
    operated: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    for store in STORES:
        kept = Kept(store, operated)
        with monkeypatch.context() as patched:
            patched.setattr(sink_records, "bind", _dies)
            with pytest.raises(KeyboardInterrupt):
                kept.run(table=f"t_{store.replace('-', '_')}", sink=store)
        assert kept.is_there(f"t_{store.replace('-', '_')}")
    kept = Kept("postgres-fold", operated)
    kept.run(table="t_postgres_fold", sink="postgres-fold", put=LINES)
    assert kept.counts("t_postgres_fold") == should(*LINES)
    operated.verify()


def _dies(*_: object) -> None:
    raise KeyboardInterrupt


def test_a_table_that_goes_while_the_driver_runs_blocks_the_txid(kept: Kept) -> None:
    kept.operated.put(*(b"c" for _ in LINES))
    goes = [lambda: kept.move("counts", "away")]
    with pytest.raises(
        SinkRefused, match=rf"(?s)txid 5 .* is blocked.*gone.*stormproof retry {NAME} 5.*ledger skip {NAME} 5 s"
    ):
        kept.operated.run(kept.built(), on_batch=lambda _: goes.pop()() if goes else None)
    (topology,) = kept.command("status")["topologies"]
    assert [(t["txid"], t["state"]) for t in topology["unresolved"] if t["state"] != "open"] == [(5, "blocked")]
    refused(kept, r"is gone.*holds txid 4 ")
    if kept.store == "delta-append":  # the batch's files lie where its table's folder was
        for file in kept.folder("counts").iterdir():
            file.rename(kept.folder("away") / file.name)
        kept.folder("counts").rmdir()
    kept.move("away", "counts")
    rows = (
        " (with --rows: only those that its table refuses)"
        if kept.store in ("postgres-append", "postgres-fold")
        else ""
    )
    refused(kept, rf"(?s)txid 5 .* is blocked.*ledger skip {NAME} 5 s{re.escape(rows)}$", error=SinkRefused)
    kept.command("retry", NAME, "5")
    kept.run()
    assert kept.counts() == should(*LINES, *(b"c" for _ in LINES))
    kept.operated.verify()


def test_what_a_blocked_txid_waits_for_may_be_given_up_too(kept: Kept) -> None:
    kept.operated.put(*(b"c" for _ in LINES))
    goes = [kept.drop]
    with pytest.raises(SinkRefused, match=r"txid 5 .* is blocked"):
        kept.operated.run(kept.built(), on_batch=lambda _: goes.pop()() if goes else None)
    assert kept.adopt("--accept-loss")["lost"]["upto"] == 4
    kept.command("retry", NAME, "5")
    kept.run()
    assert kept.counts() == should(*(b"c" for _ in LINES[4:]))
    kept.operated.verify()


# -- another table in its place ------------------------------------------------------------------------------------------


def test_rows_that_are_gone_are_given_up_only_by_name(kept: Kept) -> None:
    kept.drop()
    before = kept.bound()
    error = kept.adopt(status=1)["error"]
    assert error["kind"] == "sink_refused"
    assert "there is no table" in error["message"]
    assert "--accept-loss" in error["message"]
    assert not kept.is_there()
    assert kept.bound() == before
    report = kept.adopt("--accept-loss", "--by", "Ada", "--why", "the disk is gone")
    rows = report["lost"]["rows"]
    assert (report["lost"]["txids"], report["lost"]["found"], report["lost"]["by"]) == ("1-3", 0, "Ada")
    assert rows == 18 if kept.store.endswith("append") else rows >= 10
    kept.adopt("--accept-loss")  # again, as after a crash behind the first
    _goes_on_without(kept, by="Ada: the disk is gone")


@pytest.mark.parametrize("store", STORES)
def test_a_table_that_never_held_a_txid_is_made_again(operated: Operated, store: str) -> None:
    kept = Kept(store, operated)
    kept.run()
    kept.drop()
    kept.run(put=LINES)
    assert kept.counts() == should(*LINES)
    assert not operated.verify()["notices"]


def test_an_empty_table_in_its_place_is_not_adopted(kept: Kept) -> None:
    kept.move("counts", "away")
    kept.empty("away")
    refused(kept, "was dropped and made again, or replaced")
    before = kept.bound()
    error = kept.adopt(status=1)["error"]
    assert error["kind"] == "position_mismatch"
    says = (
        "holds no txid, the ledger says txid 3" if kept.is_delta else "has 0 rows, which is too few for what txids 1-3"
    )
    assert_matches(says + r".*--accept-loss", error["message"])
    assert kept.bound() == before
    refused(kept, "was dropped and made again, or replaced")
    assert kept.adopt("--accept-loss", "--by", "Ada", "--why", "so be it")["lost"]["txids"] == "1-3"
    _goes_on_without(kept, by="Ada: so be it")


def _goes_on_without(kept: Kept, *, by: str) -> None:
    kept.run(put=[b"c c"])
    kept.run(put=[b"c"])
    assert kept.counts() == should(b"c c c")
    notices = kept.operated.verify()["notices"]
    assert [(n["kind"], n["sink"]) for n in notices] == [("loss_accepted", "s")]
    assert "txids 1-3" in notices[0]["text"]
    assert by in notices[0]["text"]
    # What was given up is so once: the next table must hold what came after.
    kept.drop()
    assert kept.adopt("--accept-loss")["lost"]["txids"] == "4-5"


@only_postgres
def test_control_without_counting_rows_an_empty_table_passes_for_the_old_one(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.setattr(adopt_module, "_least", lambda *_: 0)
    kept.move("counts", "away")
    kept.empty("away")
    assert kept.adopt()["lost"] is None
    kept.run(put=[b"c"])
    # The audit counts a sink's table by itself, and not a state's.
    assert not kept.operated.verify(0 if "map" in request.node.name else 4)["notices"]
    assert kept.counts() == should(b"c"), "and no command said that rows are gone"


@only_postgres
def test_a_table_restored_from_a_dump_is_adopted(kept: Kept) -> None:
    kept.copy("counts", "restored")
    kept.drop()
    refused(kept, "is gone")
    kept.move("restored", "counts")
    kept.operated.put(b"c")
    refused(kept, rf"replaced.*ledger adopt-table {NAME} s$")
    assert kept.adopt("--why", "restored")["lost"] is None
    kept.run()
    assert kept.counts() == should(*LINES, b"c")
    assert not kept.operated.verify()["notices"]
    kept.adopt()  # nothing is left to do
    kept.run(put=[b"d"])
    kept.operated.verify()


def _copied_within_a_commit(kept: Kept, rows: str = "true") -> None:
    """As a dump of a whole database has it that was taken while a driver ran."""
    kept.operated.put(b"c")
    with armed("commit.after_sink=error"), pytest.raises(FailpointError):
        kept.run()
    kept.copy("counts", "restored", rows=rows)
    kept.drop()
    kept.move("restored", "counts")


@only_postgres
def test_a_table_is_adopted_that_was_copied_between_its_own_commit_and_the_ledgers(kept: Kept) -> None:
    _copied_within_a_commit(kept)
    assert kept.adopt("--why", "restored")["lost"] is None
    kept.run()
    assert kept.counts() == should(*LINES, b"c")
    kept.operated.verify()


@pytest.mark.parametrize("kept", ["postgres-append"], indirect=True)
def test_control_such_a_table_without_the_rows_of_that_commit_is_not_adopted(kept: Kept) -> None:
    _copied_within_a_commit(kept, "word <> 'c'")
    assert_matches("too few for what txids 1-4", kept.adopt(status=1)["error"]["message"])


@only_postgres
def test_a_dump_that_lacks_rows_is_not_adopted(kept: Kept) -> None:
    rows = {"append": "word <> 'b'", "fold": "word = 'b'", "map": "false"}[kept.store.partition("-")[2]]
    kept.copy("counts", "restored", rows=rows)
    kept.drop()
    kept.move("restored", "counts")
    error = kept.adopt(status=1)["error"]["message"]
    assert_matches(r"has \d rows, which is too few for what txids 1-3 wrote there \(\d+ rows\)", error)
    # Also where the ledger's own record of the first txids is gone.
    kept.command("ledger", "prune", NAME, "--older-than", "0s")
    assert_matches("too few", kept.adopt(status=1)["error"]["message"])


@only_postgres
def test_a_sink_restored_from_an_older_backup_may_be_taken_on_record(kept: Kept) -> None:
    kept.copy("counts", "restored")
    kept.run(put=LINES)
    kept.drop()
    kept.move("restored", "counts")
    kept.operated.sql("delete from stormproof_sink.evidence where txid > 3")
    kept.operated.sql(
        "update stormproof_sink.guard set (last_txid, last_digest) = (select txid, digest from "
        "stormproof_sink.evidence where txid = 3)"
    )
    assert_matches("holds txid 3 .* the ledger says txid 6 .*--accept-loss", kept.adopt(status=1)["error"]["message"])
    lost = kept.adopt("--accept-loss")["lost"]
    assert (lost["txids"], lost["upto"]) == ("4-6", 6)
    kept.run(put=[b"c"])
    assert kept.counts() == should(*LINES, b"c")
    assert kept.operated.kinds("notices", kept.operated.verify()) == ["loss_accepted"]


@only_postgres
def test_a_sink_that_is_ahead_of_the_ledger_is_never_adopted(kept: Kept) -> None:
    kept.operated.sql("update stormproof_sink.guard set last_txid = 9")
    for more in ((), ("--accept-loss",)):
        assert_matches("holds txid 9 .* the ledger says txid 3", kept.adopt(*more, status=1)["error"]["message"])


# -- another name, other columns -----------------------------------------------------------------------------------------


def test_another_table_name_under_one_sinks_name_is_said_and_makes_nothing(kept: Kept) -> None:
    kept.operated.put(b"c")
    old, new = (str(kept.folder(t)) if kept.is_delta else t for t in ("counts", "typo"))
    says = rf"'s' of topology '{NAME}' wrote to table {old}.* so far .*holds txid 3.*now it names {new}"
    text = refused(kept, rf"{says}.*there is no table {new}.*Nothing was made or written", table="typo")
    assert "dropped and made again" not in text
    assert not kept.is_there("typo")
    kept.empty("counts", "typo")
    refused(kept, rf"{says}.* is another one .*Nothing was made or written", table="typo")
    assert kept.counts("typo") == Counter()
    # Both ways on that it names.
    kept.run()
    assert kept.counts() == should(*LINES, b"c")
    kept.drop("typo")
    kept.run("typo", "t", put=[b"d"])
    assert kept.counts("typo") == should(b"d")
    assert kept.counts() == should(*LINES, b"c")
    kept.operated.verify()


def test_the_very_table_under_another_name_goes_on(kept: Kept) -> None:
    kept.move("counts", "renamed")
    kept.run("renamed", put=[b"c"])
    assert kept.counts("renamed") == should(*LINES, b"c")
    kept.operated.verify()


@only_postgres
def test_a_renamed_column_is_named_with_the_way_on(kept: Kept) -> None:
    kept.operated.sql("alter table counts rename column word to wort")
    kept.operated.put(b"c")
    text = refused(kept, rf"topology '{NAME}' cannot start: sink 's' .*no column 'word'", error=SinkRefused)
    assert_matches("Nothing was written. Repair the table and start again .*stormproof status.*new name", text)
    (topology,) = kept.command("status")["topologies"]
    assert topology["refused"]["reason"] == text
    assert f"{NAME}: epoch {topology['epoch']} did not start: " in kept.operated.text("status")
    kept.operated.sql("alter table counts rename column wort to word")
    kept.run()
    assert kept.counts() == should(*LINES, b"c")
    assert kept.command("status")["topologies"][0]["refused"] is None


def assert_matches(pattern: str, text: str) -> None:
    assert re.search(pattern, text), text
