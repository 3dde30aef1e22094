"""What is known of a table's newest version without loading it is what a reader finds there, whoever wrote meanwhile."""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, write_deltalake
from deltalake.schema import PrimitiveType
from deltalake.transaction import AddAction
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sink_harness import SCHEMA, SinkHarness

from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import StoreUnavailable
from stormproof.core.storage.files import LocalFiles
from stormproof.sinks.contract.protocol import CommitOutcome, SinkSession
from stormproof.sinks.delta import versions
from stormproof.sinks.delta.log import LAST_CHECKPOINT, DeltaLog, Label
from stormproof.sinks.delta.versions import (
    SEEN_MAX_S,
    NewestTable,
    TableAhead,
    TableHead,
    add_files,
    load_table,
    put_next,
)

ROWS = pa.table({"word": ["a"], "n": [1]})
APPLICATIONS = ("ours", "theirs")
_numbers = count()


class Place:
    """A table that one process appends to, and others change."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)
        write_deltalake(self.path, ROWS)
        self.log = DeltaLog(self.path)
        self.newest = NewestTable(self.log, "table")
        self.numbers = count(1)

    def append(self) -> None:
        number = next(self.numbers)
        head, label = self.newest.head(), Label("ours", number, {})
        file = AddAction(f"{number}.parquet", 1, {}, 1, data_change=True, stats='{"numRecords":1}')
        if put_next(self.log, head, [file], label):
            self.newest.follow(head, label)
        else:
            add_files(self.newest.load(), [file], label.for_delta_rs())

    def append_and_be_overtaken(self) -> None:
        """Another version comes between ours and our hearing of it."""
        number = next(self.numbers)
        head, label = self.newest.head(), Label("ours", number, {})
        if put_next(self.log, head, [], label):
            self.others_append()
            self.newest.follow(head, label)

    def merge(self) -> None:
        """delta-rs takes the loaded table to the version that it writes."""
        self._merge_into(self.newest.load())

    def merge_behind_others(self) -> None:
        """The same, where another version comes between the one that was loaded and ours."""
        table = self.newest.load()
        self.others_append()
        self._merge_into(table)

    def _merge_into(self, table: DeltaTable) -> None:
        # No file is looked into: those that are appended here do not exist.
        label = Label("ours", next(self.numbers), {}).for_delta_rs()
        merge = table.merge(ROWS, "false", source_alias="s", target_alias="t", commit_properties=label)
        merge.when_not_matched_insert({"word": "s.word", "n": "s.n"}).execute()

    def others_append(self) -> None:
        label = Label("theirs", next(self.numbers), {})
        add_files(DeltaTable(self.path), [], label.for_delta_rs())

    def others_set_a_property(self) -> None:
        DeltaTable(self.path).alter.set_table_properties(
            {"delta.logRetentionDuration": f"interval {next(self.numbers)} days"}
        )

    def others_add_a_column(self) -> None:
        DeltaTable(self.path).alter.add_columns([Field(f"c{next(self.numbers)}", PrimitiveType("long"))])

    def others_checkpoint(self) -> None:
        DeltaTable(self.path).create_checkpoint()

    def others_clean_up_in_part(self) -> None:
        """Of the entries below a checkpoint one is gone that is right behind a version which the process knows."""
        known = DeltaTable(self.path).version()
        self.others_append()
        self.others_append()
        self.others_checkpoint()
        Path(self.log.entry_path(known + 1)).unlink()

    def others_restore(self) -> None:
        """To the version before, where a clean-up has left it."""
        table = DeltaTable(self.path)
        if table.version() and Path(self.log.entry_path(table.version() - 1)).exists():
            table.restore(table.version() - 1, ignore_missing_files=True)

    def others_make_it_anew(self) -> None:
        shutil.rmtree(self.path)
        write_deltalake(self.path, ROWS)

    def load(self) -> None:
        assert sorted(self.newest.load().file_uris()) == sorted(DeltaTable(self.path).file_uris())

    def forget(self) -> None:
        self.newest.forget()


STEPS: dict[str, Callable[[Place], None]] = {
    name: getattr(Place, name)
    for name in (
        *("append", "append_and_be_overtaken", "merge", "merge_behind_others", "load"),
        *("forget", "others_append", "others_set_a_property"),
        *("others_add_a_column", "others_checkpoint", "others_restore", "others_make_it_anew"),
        "others_clean_up_in_part",
    )
}


def facts(table: TableHead) -> tuple[object, ...]:
    metadata, protocol = table.metadata(), table.protocol()
    return (
        table.version(),
        [table.transaction_version(one) for one in APPLICATIONS],
        (metadata.id, metadata.partition_columns, metadata.configuration),
        (protocol.min_reader_version, protocol.min_writer_version, protocol.writer_features),
        table.schema().to_json(),
    )


@settings(deadline=None)
@given(steps=st.lists(st.one_of(st.just("append"), st.sampled_from(sorted(STEPS))), max_size=12))
def test_the_head_is_what_a_reader_finds(steps: list[str], tmp_path_factory: pytest.TempPathFactory) -> None:
    place = Place(tmp_path_factory.getbasetemp() / f"head-{next(_numbers)}")
    for step in steps:
        STEPS[step](place)
        assert facts(place.newest.head()) == facts(DeltaTable(place.path)), step


def test_a_table_whose_versions_are_our_own_is_loaded_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads = list[str]()

    def counted(address: str) -> DeltaTable:
        loads.append(address)
        return load_table(address)

    monkeypatch.setattr(versions, "load_table", counted)
    place = Place(tmp_path / "table")
    for _ in range(5):
        place.merge()
        place.append()
    place.load()
    assert len(loads) == 1


class Blind(NewestTable):
    """Takes the version that it followed for the newest one, whatever came behind it."""

    def head(self) -> DeltaTable | TableAhead:
        return super().head() if self._ahead is None else self._ahead.head


def test_control_a_head_that_does_not_look_behind_itself_is_caught(tmp_path: Path) -> None:
    place = Place(tmp_path / "table")
    place.newest = Blind(place.log, "table")
    place.append()
    place.others_set_a_property()
    assert facts(place.newest.head()) != facts(DeltaTable(place.path))


class Trusting(NewestTable):
    """Takes a missing entry for one that was never there."""

    def _checkpoint_state(self) -> None:
        return None


@pytest.mark.parametrize("step", ["load", "append"])
def test_control_a_head_that_knows_no_clean_up_is_caught(step: str, tmp_path: Path) -> None:
    place = Place(tmp_path / "table")
    place.newest = Trusting(place.log, "table")
    STEPS[step](place)
    place.others_clean_up_in_part()
    assert facts(place.newest.head()) != facts(DeltaTable(place.path))


@pytest.mark.parametrize("step", ["load", "append"])
def test_a_version_that_was_seen_long_ago_is_not_taken_for_the_newest(step: str, tmp_path: Path) -> None:
    """A clean-up by a writer that names no checkpoint."""
    place = Place(tmp_path / "table")
    clock = ManualClock()
    place.newest = NewestTable(place.log, "table", clock)
    STEPS[step](place)
    place.others_clean_up_in_part()
    (Path(place.log.folder) / LAST_CHECKPOINT).unlink()
    clock.advance(SEEN_MAX_S)
    assert facts(place.newest.head()) == facts(DeltaTable(place.path))


def test_a_place_that_does_not_answer_is_an_outage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = Place(tmp_path / "table")
    place.append()

    def away(*_: object) -> None:
        raise OSError(errno.EIO, "away")

    monkeypatch.setattr(LocalFiles, "stat", away)
    with pytest.raises(StoreUnavailable, match="cannot be read"):
        place.newest.head()


@pytest.fixture
def harness(tmp_path: Path) -> SinkHarness:
    return SinkHarness("delta-append", tmp_path, None)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was loaded, updated or listed."""
    seen: list[str] = []

    def spy(owner: type, name: str) -> None:
        real = getattr(owner, name)

        def called(*given: object, **named: object) -> object:
            seen.append(name)
            return real(*given, **named)

        monkeypatch.setattr(owner, name, called)

    for name in ("__init__", "update_incremental", "create_write_transaction"):
        spy(DeltaTable, name)
    spy(LocalFiles, "list")
    return seen


def test_appends_neither_load_the_table_nor_list_its_log(harness: SinkHarness, looked: list[str]) -> None:
    session = harness.open()
    last = 30
    for txid in range(1, last + 1):
        transaction = harness.prepare(session, txid, txid - 1 or None, {f"w{txid}": 1})
        looked.clear()
        session.commit(transaction, checked=True)
        session.finished(transaction)
        assert looked == []
    assert harness.rows() == Counter({(f"w{txid}", 1): 1 for txid in range(1, last + 1)})
    assert [entry.txid for entry in session.evidence(0, None).entries] == list(range(1, last + 1))


class At:
    """Does something the first time that a commit reaches its failpoint."""

    def __init__(self, name: str, act: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
        self.name, self.act, self.left = name, act, 1
        monkeypatch.setattr("stormproof.sinks.delta.transactional_table.failpoint", self)

    def __call__(self, name: str) -> None:
        if name == self.name and self.left:
            self.left -= 1
            self.act()


def committed(harness: SinkHarness, session: SinkSession, txid: int, *, checked: bool = True) -> CommitOutcome:
    transaction = harness.prepare(session, txid, txid - 1 or None, {f"w{txid}": 1})
    return session.commit(transaction, checked=checked).outcome


def require_rows(harness: SinkHarness, session: SinkSession, last: int, *, theirs: int = 0) -> None:
    ours = {(f"w{txid}", 1): 1 for txid in range(1, last + 1)}
    assert harness.rows() == Counter({**ours, **({("theirs", 1): theirs} if theirs else {})})
    assert session.evidence(last, None).entries[-1].txid == last


def others_append(harness: SinkHarness) -> None:
    write_deltalake(str(harness.delta_path), pa.table({"word": ["theirs"], "n": [1]}, schema=SCHEMA), mode="append")


def others_clean_up(harness: SinkHarness) -> None:
    """Two versions of others, a checkpoint, and a clean-up that has removed the first of them so far."""
    version = DeltaTable(str(harness.delta_path)).version()
    others_append(harness)
    others_append(harness)
    DeltaTable(str(harness.delta_path)).create_checkpoint()
    Path(DeltaLog(str(harness.delta_path)).entry_path(version + 1)).unlink()


def test_a_version_that_is_delta_rs_s_to_write_is_checked_once(
    harness: SinkHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third one has a checkpoint."""
    session = harness.open()
    DeltaTable(str(harness.delta_path)).alter.set_table_properties({"delta.checkpointInterval": "3"})
    reached: list[str] = []
    monkeypatch.setattr("stormproof.sinks.delta.transactional_table.failpoint", reached.append)
    for txid in range(1, 8):
        assert committed(harness, session, txid) is CommitOutcome.APPLIED
    assert reached.count("delta.after_check") == 7
    require_rows(harness, session, 7)


def test_behind_another_writers_version_the_table_is_looked_at_and_the_batch_committed_once(
    harness: SinkHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the check and the log entry, each time by a driver that adds a row of its own."""
    session = harness.open()
    for txid in range(1, 6):
        At("delta.after_check", partial(others_append, harness), monkeypatch)
        assert committed(harness, session, txid) is CommitOutcome.APPLIED
    require_rows(harness, session, 5, theirs=5)


@pytest.mark.parametrize("checked", [True, False])
def test_no_entry_is_confirmed_in_the_hole_of_a_clean_up(harness: SinkHarness, checked: bool) -> None:
    session = harness.open()
    for txid in (1, 2, 3):
        committed(harness, session, txid)
    others_clean_up(harness)
    assert committed(harness, session, 4, checked=checked) is CommitOutcome.APPLIED
    require_rows(harness, session, 4, theirs=2)


def not_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place does not answer when it is asked whether the log is as it was seen."""

    def is_as_seen(*_: object) -> bool:
        raise OSError(errno.EIO, "away")

    monkeypatch.setattr(NewestTable, "is_as_seen", is_as_seen)


def raising_afterwards(error: OSError, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry is put, and then there is an error."""
    put_new = LocalFiles.put_new

    def put(files: LocalFiles, path: str, data: bytes) -> None:
        put_new(files, path, data)
        raise error

    monkeypatch.setattr(LocalFiles, "put_new", put)


ANSWERS: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    "clear": lambda _: None,
    "not seen": not_seen,
    "error afterwards": partial(raising_afterwards, OSError(errno.EIO, "away")),
    "taken by itself": partial(raising_afterwards, FileExistsError(errno.EEXIST, "the first answer was lost")),
}
after_each_answer = pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS)


@after_each_answer
def test_an_unclear_answer_is_no_second_commit(
    answer: Callable[[pytest.MonkeyPatch], None], harness: SinkHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = harness.open()
    committed(harness, session, 1)
    transaction = harness.prepare(session, 2, 1, {"w2": 1})
    with monkeypatch.context() as patch:
        answer(patch)
        assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
    committed(harness, session, 3)
    require_rows(harness, session, 3)


@after_each_answer
def test_a_clean_up_between_the_look_and_the_entry_is_noticed(
    answer: Callable[[pytest.MonkeyPatch], None], harness: SinkHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = harness.open()
    for txid in (1, 2):
        committed(harness, session, txid)
    At("delta.after_check", partial(others_clean_up, harness), monkeypatch)
    transaction = harness.prepare(session, 3, 2, {"w3": 1})
    with monkeypatch.context() as patch:
        answer(patch)
        with pytest.raises(StoreUnavailable, match="cleaned up meanwhile"):
            session.commit(transaction, checked=True)
    assert session.commit(transaction, checked=True).outcome is CommitOutcome.APPLIED
    committed(harness, session, 4)
    require_rows(harness, session, 4, theirs=2)


@pytest.mark.parametrize("checked", [True, False])
def test_an_entry_that_arrives_after_its_error_is_the_commit(
    harness: SinkHarness, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """It lands when the transaction is tried again, after the table was looked at: it is not added a second time."""
    session = harness.open()
    committed(harness, session, 1)
    transaction = harness.prepare(session, 2, 1, {"w2": 1})
    put_new, late = LocalFiles.put_new, list[tuple[str, bytes]]()

    def lost(_: LocalFiles, path: str, data: bytes) -> None:
        late.append((path, data))
        raise OSError(errno.ETIMEDOUT, "no answer")

    with monkeypatch.context() as patch:
        patch.setattr(LocalFiles, "put_new", lost)
        with pytest.raises(StoreUnavailable):
            session.commit(transaction, checked=checked)
    At("delta.after_check", lambda: put_new(LocalFiles(), *late[0]), monkeypatch)
    assert session.commit(transaction, checked=checked).outcome is CommitOutcome.APPLIED
    committed(harness, session, 3)
    require_rows(harness, session, 3)
