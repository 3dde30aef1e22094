"""What a power loss may leave of a Delta table, piece by piece, and what the sink makes of it."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from support.sink_harness import SCHEMA, SinkHarness

from stormproof.core.base.errors import SinkRefused
from stormproof.core.storage.files import LocalFiles
from stormproof.sinks.contract.protocol import CommitOutcome, Held, PreparedTransaction, SinkProblem, SinkSession
from stormproof.sinks.delta import opening
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.delta.power_loss import lost_block, tear, unreadable
from stormproof.sinks.delta.session import DeltaSession
from stormproof.trident.state.delta import DeltaMap
from stormproof.trident.state.sink import StateSink

A, B = {"a": 1}, {"a": 10, "b": 2}


@pytest.fixture(params=["delta-append", "delta-fold"])
def harness(request: pytest.FixtureRequest, tmp_path: Path) -> SinkHarness:
    return SinkHarness(request.param, tmp_path, None)


@pytest.fixture
def fold(tmp_path: Path) -> SinkHarness:
    return SinkHarness("delta-fold", tmp_path, None)


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    paths: set[str] = set()
    monkeypatch.setattr(os, "fsync", lambda fd: paths.add(os.path.realpath(f"/proc/self/fd/{fd}")))
    return paths


def log_of(harness: SinkHarness) -> DeltaLog:
    return DeltaLog(str(harness.delta_path))


def entry(harness: SinkHarness, version: int) -> Path:
    return Path(log_of(harness).entry_path(version))


def two(harness: SinkHarness) -> tuple[SinkSession, PreparedTransaction]:
    """Txids 1 and 2 in versions 1 and 2."""
    session = harness.open()
    session.commit(harness.prepare(session, 1, None, A), checked=True)
    second = harness.prepare(session, 2, 1, B, tasks=2)
    session.commit(second, checked=True)
    return session, second


def after_two(harness: SinkHarness) -> Counter[tuple[str, int]]:
    return Counter([("a", 11), ("b", 2)] if harness.fold else [("a", 1), ("a", 10), ("b", 2)])


def without_last_line(content: bytes) -> bytes:
    return b"\n".join(content.splitlines()[:-1])


TEARS: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "cut in half": lambda content: content[: len(content) // 2],
    "zeros": lambda content: bytes(len(content)),
    "zeros at the end": lambda content: content[: len(content) // 2] + bytes(len(content) - len(content) // 2),
    "without its transaction": without_last_line,
    "nothing but the commit's information": lambda content: content.splitlines()[0],
    "without its files": lambda content: b"\n".join(line for line in content.splitlines() if b'{"add"' not in line),
}


@pytest.mark.parametrize("how", TEARS)
def test_a_torn_log_entry_is_a_lost_one(harness: SinkHarness, how: str) -> None:
    _, second = two(harness)
    path = entry(harness, 2)
    path.write_bytes(TEARS[how](path.read_bytes()))
    torn = path.read_bytes()
    with pytest.raises(SinkRefused, match=r"00002\.json is torn, as a power loss leaves it.*next start"):
        harness.sink.inspect(harness.identity, harness.input)
    session = harness.open(2)
    held = session.held()
    assert held is not None
    assert held.txid == 1
    (aside,) = path.parent.glob(".stormproof-torn-*")
    assert aside.read_bytes() == torn
    assert session.commit(second, checked=True).outcome is CommitOutcome.APPLIED
    assert harness.rows() == after_two(harness)
    assert [e.txid for e in session.evidence(0, None).entries] == [1, 2]
    assert DeltaTable(harness.delta_path).version() == 2


@pytest.mark.parametrize("how", ["empty", "nothing but the commit's information"])
def test_control_delta_rs_itself_takes_a_torn_entry_for_a_version(harness: SinkHarness, how: str) -> None:
    two(harness)
    path = entry(harness, 2)
    path.write_bytes(TEARS[how](path.read_bytes()))
    assert DeltaTable(harness.delta_path).version() == 2
    assert harness.rows() == Counter({("a", 1): 1})


def test_every_prefix_of_an_entry_is_told_from_the_whole(harness: SinkHarness) -> None:
    two(harness)
    whole = entry(harness, 2).read_bytes()
    assert tear(whole) is None
    assert [n for n in range(len(whole)) if tear(whole[:n]) is None] == []


def test_another_writers_torn_entry_is_put_aside_and_a_whole_one_stays(harness: SinkHarness) -> None:
    two(harness)
    write_deltalake(harness.delta_path, pa.table({"word": ["x"], "n": [1]}, schema=SCHEMA), mode="append")
    harness.open(2)
    assert DeltaTable(harness.delta_path).version() == 3
    entry(harness, 3).write_bytes(b"")
    session = harness.open(2)
    assert session.held() is not None
    assert harness.rows() == after_two(harness)


@pytest.mark.parametrize("lost", ["torn", "missing"])
def test_more_than_the_newest_version_lost_stops_by_name(harness: SinkHarness, lost: str) -> None:
    """Ours survived, another writer's before it did not: it is in no prepared file."""
    two(harness)
    if lost == "torn":
        for version in (1, 2):
            entry(harness, version).write_bytes(b"")
    else:
        entry(harness, 1).unlink()
    before = sorted(os.listdir(entry(harness, 1).parent))
    with pytest.raises(SinkRefused, match=r"00001\.json is .*another writer's.*from a backup") as caught:
        harness.open(2)
    assert caught.value.details["problem"] == SinkProblem.FILE_LOST
    assert sorted(os.listdir(entry(harness, 1).parent)) == before


def test_a_table_whose_making_was_cut_short_is_made_again(harness: SinkHarness) -> None:
    harness.open()
    entry(harness, 0).write_bytes(b"")
    session = harness.open(2)
    session.commit(harness.prepare(session, 1, None, A), checked=True)
    assert harness.rows() == Counter({("a", 1): 1})


def _empty(path: Path) -> None:
    path.write_bytes(b"")


def _half(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("damage", [_empty, _half, Path.unlink])
@pytest.mark.parametrize("which", ["both", "checkpoint", "hint"])
def test_a_torn_checkpoint_is_put_aside(
    harness: SinkHarness, damage: Callable[[Path], object], which: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "CHECKPOINT_INTERVAL", 3)  # then one comes with version 2
    _, second = two(harness)
    folder = entry(harness, 0).parent
    for name, path in (
        ("checkpoint", Path(log_of(harness).checkpoint_path(2))),
        ("hint", folder / "_last_checkpoint"),
    ):
        if which in (name, "both"):
            damage(path)
    session = harness.open(2)
    assert session.commit(second, checked=True).outcome is CommitOutcome.ALREADY_HELD
    for txid, word in enumerate("cde", 3):
        session.commit(harness.prepare(session, txid, txid - 1, {word: txid}), checked=True)
    assert harness.rows() == after_two(harness) + Counter({("c", 3): 1, ("d", 4): 1, ("e", 5): 1})
    assert 5 in log_of(harness).checkpoints()


@pytest.mark.parametrize("damage", [_empty, Path.unlink])
def test_a_checkpoint_that_outlived_its_own_entry_is_put_aside_with_it(
    harness: SinkHarness, damage: Callable[[Path], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "CHECKPOINT_INTERVAL", 3)
    _, second = two(harness)
    assert 2 in log_of(harness).checkpoints()
    damage(entry(harness, 2))
    session = harness.open(2)
    held = session.held()
    assert held is not None
    assert held.txid == 1
    assert session.commit(second, checked=True).outcome is CommitOutcome.APPLIED
    assert harness.rows() == after_two(harness)
    assert session.held() == Held(2, second.digest)


def test_old_log_entries_go_only_after_the_checkpoint_is_synced(
    harness: SinkHarness, synced: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(opening, "CHECKPOINT_INTERVAL", 3)  # then one comes with version 2
    cleaned: list[bool] = []
    checkpoint = log_of(harness).checkpoint_path(2)
    monkeypatch.setattr(DeltaTable, "cleanup_metadata", lambda _: cleaned.append(checkpoint in synced))
    two(harness)
    assert cleaned == [True]


def test_other_writers_versions_before_ours_are_synced_with_ours(harness: SinkHarness, synced: set[str]) -> None:
    session, _ = two(harness)
    write_deltalake(harness.delta_path, pa.table({"word": ["x"], "n": [1]}, schema=SCHEMA), mode="append")
    theirs = log_of(harness).entry(3)
    assert theirs is not None
    third = harness.prepare(session, 3, 2, {"c": 3})
    for attempt in (1, 2):  # found after a crash, it is synced again
        synced.clear()
        harness.open(attempt).commit(third, checked=True)
        assert {str(entry(harness, 3)), log_of(harness).local_path(theirs.added[0].path)} <= synced


def append_theirs(harness: SinkHarness) -> list[str]:
    """Two versions of another writer's; their files."""
    log, paths = log_of(harness), list[str]()
    for _ in range(2):
        write_deltalake(harness.delta_path, pa.table({"word": ["x"], "n": [1]}, schema=SCHEMA), mode="append")
        version = DeltaTable(str(harness.delta_path)).version()
        theirs = log.entry(version)
        assert theirs is not None
        paths += [str(log.entry_path(version)), str(log.local_path(theirs.added[0].path))]
    return paths


@pytest.mark.parametrize("what", ["commit", "release", "compaction"])
def test_an_entry_that_is_synced_before_it_has_its_name_comes_after_what_is_before_it(
    what: str, tmp_path: Path, synced: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A power loss in between would leave a whole entry behind a torn one."""
    harness = SinkHarness("delta-append", tmp_path, None)
    session, _ = two(harness)
    third = harness.prepare(session, 3, 2, {"c": 3})
    theirs = append_theirs(harness)
    put_new, unsynced = LocalFiles.put_new, list[set[str]]()

    def put(files: LocalFiles, path: str, data: bytes) -> None:
        unsynced.append(set(theirs) - synced)
        put_new(files, path, data)

    monkeypatch.setattr(LocalFiles, "put_new", put)
    synced.clear()
    match what:
        case "commit":
            session.commit(third, checked=True)
        case "release":
            session.claim(())
            assert session.release()
        case _:
            assert isinstance(session, DeltaSession)
            session.compact()
    assert unsynced
    assert not unsynced[0]


# A MERGE whose files were lost


def lose_a_file(harness: SinkHarness) -> Path:
    newest = log_of(harness).entry(log_of(harness).versions()[-1])
    assert newest is not None
    path = Path(log_of(harness).table, newest.added[0].path)
    path.unlink()
    return path


def restore(harness: SinkHarness, transaction: PreparedTransaction) -> str | None:
    session = harness.sink.inspect(harness.identity, harness.input)
    return session.restore_lost(transaction)


@pytest.mark.parametrize(("kind", "bits"), [("fold", 20), ("fold", 40), ("fold", 64), ("state", 64)])
def test_a_block_of_zeros_anywhere_in_a_merged_file_is_seen(
    request: pytest.FixtureRequest, kind: str, bits: int
) -> None:
    """The file has its size: its name and length reached the disk, and one block of 4 KiB did not."""
    merging: SinkHarness = request.getfixturevalue(kind)
    session, numbers = merging.open(), random.Random(1)
    counts = {f"word {i}": numbers.getrandbits(bits) - 2 ** (bits - 1) for i in range(12_000)}
    only = merging.prepare(session, 1, None, counts)
    session.commit(only, checked=True)
    (added,) = [file for version in (1,) if (e := log_of(merging).entry(version)) for file in e.added]
    path = Path(log_of(merging).table, added.path)
    whole = path.read_bytes()
    assert len(whole) > 100_000
    undecodable, seen, blocks = set(), set(), range(0, len(whole), 4096)
    assert unreadable(str(path), added.rows) is None
    assert lost_block(str(path)) is None
    for at in blocks:
        path.write_bytes(whole[:at] + bytes(len(whole[at : at + 4096])) + whole[at + 4096 :])
        if unreadable(str(path), added.rows) is not None:
            undecodable.add(at)
        elif lost_block(str(path)) == at:
            seen.add(at)
        with pytest.raises(SinkRefused, match=r"version 1 holds txid 1, but .*(cannot be read|has lost the block)"):
            merging.open(2).commit(only, checked=True)
    assert sorted(undecodable | seen) == [*blocks]
    if bits == 64:  # control: of values with nothing to compress, some decode with zeros in their place
        assert seen


@pytest.mark.parametrize("again", [False, True])
def test_a_lost_merge_is_taken_back_and_made_again(fold: SinkHarness, again: bool, synced: set[str]) -> None:
    _, second = two(fold)
    lost = lose_a_file(fold)
    for epoch in (2, 3) if again else (2,):  # the second MERGE may be lost as well
        with pytest.raises(SinkRefused, match=rf"file lost: version \d holds txid 2, but .*{lost.name} is missing"):
            fold.open(epoch).commit(second, checked=True)
        synced.clear()
        said = restore(fold, second)
        assert said is not None
        assert f"{lost.name} is missing" in said
        restored = DeltaTable(fold.delta_path).version()
        assert str(entry(fold, restored)) in synced
        assert restore(fold, second) is None
        session = fold.open(epoch)
        held = session.held()
        assert held is not None
        assert held.txid == 1
        report = session.evidence(0, None)
        assert ([e.txid for e in report.entries], report.last_txid, report.problems) == ([1], 1, ())
        assert fold.rows() == Counter({("a", 1): 1})
        assert session.commit(second, checked=True).outcome is CommitOutcome.APPLIED
        assert fold.rows() == after_two(fold)
        lost = lose_a_file(fold) if again and epoch == 2 else lost
    session = fold.open(4)
    assert session.held() == Held(2, second.digest)
    assert session.commit(second, checked=True).outcome is CommitOutcome.ALREADY_HELD
    report = session.evidence(0, None)
    assert [(e.txid, e.problem) for e in report.entries] == [(1, None), (2, None)]
    assert (report.last_txid, report.problems) == (2, ())
    session.commit(fold.prepare(session, 3, 2, A), checked=True)
    assert fold.rows() == Counter([("a", 12), ("b", 2)])


def test_the_very_first_merge_is_taken_back_to_an_empty_table(fold: SinkHarness) -> None:
    session = fold.open()
    first = fold.prepare(session, 1, None, A)
    session.commit(first, checked=True)
    lose_a_file(fold)
    assert restore(fold, first)
    session = fold.open(2)
    assert session.held() is None
    report = session.evidence(0, None)
    assert (report.entries, report.last_txid, report.problems) == ((), None, ())
    session.commit(first, checked=True)
    assert fold.rows() == Counter({("a", 1): 1})


def test_a_torn_restore_is_made_again(fold: SinkHarness) -> None:
    _, second = two(fold)
    lose_a_file(fold)
    assert restore(fold, second)
    entry(fold, 3).write_bytes(b"")
    with pytest.raises(SinkRefused, match="is torn"):
        restore(fold, second)
    session = fold.open(2)
    with pytest.raises(SinkRefused, match="file lost"):
        session.commit(second, checked=True)
    assert restore(fold, second)
    session.commit(second, checked=True)
    assert fold.rows() == after_two(fold)


def test_what_another_hand_restored_is_still_a_mismatch(fold: SinkHarness) -> None:
    """Only a RESTORE of our own, for this commit, takes it back."""
    session, second = two(fold)
    DeltaTable(fold.delta_path).restore(1)
    with pytest.raises(Exception, match="version 3 restored the table"):
        session.commit(second, checked=True)
    text = entry(fold, 3).read_text()
    information = json.loads(text.splitlines()[0])["commitInfo"]
    assert not any(key.startswith("stormproof.") for key in information)


def test_nothing_is_taken_back_where_nothing_is_lost_or_the_prepared_files_are(fold: SinkHarness) -> None:
    _, second = two(fold)
    assert restore(fold, second) is None
    lose_a_file(fold)
    (fold.staging / second.files[0].path).unlink()
    with pytest.raises(SinkRefused, match=rf"{second.files[0].path} is missing"):
        restore(fold, second)
    assert DeltaTable(fold.delta_path).version() == 2


def test_later_versions_are_not_taken_back_with_it(fold: SinkHarness) -> None:
    _, second = two(fold)
    lost = lose_a_file(fold)
    entry(fold, 3).write_text('{"commitInfo":{"operation":"WRITE"}}')
    with pytest.raises(SinkRefused, match=rf"{lost.name}.*versions up to 3 came after it.*version 1"):
        restore(fold, second)


def test_an_adopted_file_that_is_lost_must_be_put_back(tmp_path: Path) -> None:
    append = SinkHarness("delta-append", tmp_path, None)
    _, second = two(append)
    lost = lose_a_file(append)
    lost.with_name(f"_{lost.name}").unlink()  # otherwise it is put back from its second name
    assert restore(append, second) is None
    with pytest.raises(SinkRefused, match=rf"{lost.name} is missing; it was lost after the commit; put the file back"):
        append.open(2).commit(second, checked=True)


# A state in a Delta table


@pytest.fixture
def state(fold: SinkHarness) -> SinkHarness:
    fold.sink = StateSink("counts", DeltaMap(fold.delta_path, "transactional"), staging=fold.staging)
    return fold


def test_a_state_that_holds_a_batch_is_synced_before_that_counts(state: SinkHarness, synced: set[str]) -> None:
    _, second = two(state)
    written = log_of(state).entry(2)
    assert written is not None
    synced.clear()
    assert state.open(2).commit(second, checked=True).outcome is CommitOutcome.ALREADY_HELD
    assert {str(entry(state, 2)), *(log_of(state).local_path(f.path) for f in written.added)} <= synced


def test_a_states_lost_merge_is_taken_back_and_made_again(state: SinkHarness) -> None:
    _, second = two(state)
    lost = lose_a_file(state)
    with pytest.raises(SinkRefused, match=rf"file lost: .*{lost.name} is missing"):
        state.open(2).commit(second, checked=True)
    kept = (state.staging / second.files[0].path).rename(state.folder / "kept")
    with pytest.raises(SinkRefused, match=rf"{second.files[0].path} is missing"):
        restore(state, second)
    kept.rename(state.staging / second.files[0].path)
    assert restore(state, second)
    assert restore(state, second) is None
    assert state.open(2).commit(second, checked=True).outcome is CommitOutcome.APPLIED
    assert state.rows() == after_two(state)
