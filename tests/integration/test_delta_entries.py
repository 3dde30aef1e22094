"""Log entries that are written here say what delta-rs's say, never take a name that is taken, and leave it the rest."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, DeltaTable, Schema, write_deltalake
from deltalake.transaction import AddAction
from hypothesis import given, settings
from hypothesis import strategies as st
from support.sink_harness import SCHEMA, SinkHarness

from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.sink import SinkInput
from stormproof.core.storage.files import LocalFiles
from stormproof.sinks.contract.protocol import CommitOutcome, SinkIdentity
from stormproof.sinks.delta.log import DeltaLog, Label
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.delta.versions import HOOKS, add_files, put_next

ROWS = pa.table({"word": ["a"], "n": [1]})
LABEL = Label("ours", 7, {"stormproof.application": "ours"})
_numbers = count()


def made(path: Path, **settings: Any) -> str:
    write_deltalake(str(path), ROWS, **settings)
    return str(path)


def added(name: str = "new.parquet", **changed: Any) -> AddAction:
    said: dict[str, Any] = {"size": 500, "partition_values": {}, "stats": '{"numRecords":1}', **changed}
    return AddAction(name, modification_time=1_700_000_000_000, data_change=True, **said)


def entries(path: str) -> dict[int, list[dict[str, Any]]]:
    log = DeltaLog(path)
    return {
        version: [json.loads(line) for line in Path(log.entry_path(version)).read_bytes().splitlines()]
        for version in log.versions()
    }


def names(path: str) -> list[str]:
    return sorted(file.name for file in (Path(path) / "_delta_log").iterdir())


def told(actions: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """What an entry says, but for times, for who wrote it, and for what it says is not there."""
    for action in actions:
        ((kind, about),) = action.items()
        left_out = {"timestamp", "engineInfo", "clientVersion", "lastUpdated"}
        yield kind, {name: value for name, value in about.items() if name not in left_out and value is not None}


texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@settings(deadline=None)
@given(
    files=st.lists(
        st.builds(
            added,
            st.from_regex(r"[A-Za-z0-9][A-Za-z0-9_.~/=-]{0,20}\.parquet", fullmatch=True),
            size=st.integers(1, 2**40),
            partition_values=st.fixed_dictionaries({"word": st.none() | texts}),
            stats=st.integers(0, 2**31).map(lambda rows: json.dumps({"numRecords": rows})),
        ),
        max_size=3,
        unique_by=lambda file: file.path,
    ),
    version=st.integers(0, 2**62),
    metadata=st.dictionaries(texts.map("stormproof.{}".format), texts, max_size=3),
)
def test_an_entry_says_what_delta_rs_says(
    files: list[AddAction], version: int, metadata: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"entries-{next(_numbers)}"
    ours, theirs = (made(folder / who, partition_by=["word"]) for who in ("ours", "theirs"))
    label = Label("ours", version, metadata)
    assert put_next(DeltaLog(ours), DeltaTable(ours), files, label)
    table = DeltaTable(theirs)
    table.create_write_transaction(
        [*files],
        "append",
        table.schema(),
        ["word"],
        commit_properties=label.for_delta_rs(),
        post_commithook_properties=HOOKS,
    )
    assert sorted(told(entries(ours)[1]), key=repr) == sorted(told(entries(theirs)[1]), key=repr)
    read, expected = DeltaTable(ours), DeltaTable(theirs)
    assert read.version() == expected.version() == 1
    assert read.transaction_version("ours") == version
    paths = {file.path for file in files}
    assert paths <= set(pa.table(read.get_add_actions()).column("path").to_pylist())
    assert names(ours) == names(theirs)


@pytest.mark.parametrize("name", ["a b.parquet", "a%20b.parquet", "é.parquet", "a#b.parquet", "a+b.parquet"])
def test_a_name_that_writers_may_spell_differently_is_left_to_delta_rs(name: str, tmp_path: Path) -> None:
    path = made(tmp_path / "table")
    assert not put_next(DeltaLog(path), DeltaTable(path), [added(name)], LABEL)
    assert list(entries(path)) == [0]


@pytest.mark.parametrize(
    "protocol",
    [
        {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["inCommitTimestamp"]},
        {
            "minReaderVersion": 1,
            "minWriterVersion": 7,
            "writerFeatures": ["appendOnly", "rowTracking", "domainMetadata"],
        },
        {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["something new"]},
        {"minReaderVersion": 2, "minWriterVersion": 5},
        {"minReaderVersion": 1, "minWriterVersion": 8},
    ],
    ids=["times in commits", "row tracking", "unknown", "column mapping", "a later version"],
)
def test_a_table_whose_features_ask_more_is_left_to_delta_rs(protocol: dict[str, Any], tmp_path: Path) -> None:
    path = made(tmp_path / "table")

    class Featured(DeltaTable):
        """The table, with another protocol."""

        def protocol(self) -> Any:
            return type(super().protocol())(
                protocol["minReaderVersion"], protocol["minWriterVersion"], protocol.get("writerFeatures"), None
            )

    assert not put_next(DeltaLog(path), Featured(path), [added()], LABEL)
    assert list(entries(path)) == [0]


@pytest.mark.parametrize("features", [[], ["appendOnly", "invariants", "timestampNtz"]])
def test_a_table_that_lists_plain_features_is_written_here(features: list[str], tmp_path: Path) -> None:
    path = made(tmp_path / "table")

    class Featured(DeltaTable):
        """The table, with the protocol that lists features."""

        def protocol(self) -> Any:
            return type(super().protocol())(1, 7, features, None)

    assert put_next(DeltaLog(path), Featured(path), [added()], LABEL)


@pytest.mark.parametrize("interval", [None, "1", "3", "7", "none"])
def test_checkpoints_are_where_delta_rs_makes_them(interval: str | None, tmp_path: Path) -> None:
    settings = {} if interval is None else {"delta.checkpointInterval": interval}
    ours, theirs = (made(tmp_path / who, configuration={**settings} or None) for who in ("ours", "theirs"))
    for number in range(102 if interval is None else 15):
        file = added(f"{number}.parquet")
        label = Label("ours", number + 1, {})
        if not put_next(DeltaLog(ours), DeltaTable(ours), [file], label):
            add_files(DeltaTable(ours), [file], label.for_delta_rs())
        add_files(DeltaTable(theirs), [file], label.for_delta_rs())
    assert names(ours) == names(theirs)
    assert any("checkpoint" in name for name in names(ours)) == (interval != "none")  # then it is 100


def test_a_name_that_is_taken_stays_whose_it_is(tmp_path: Path) -> None:
    path = made(tmp_path / "table")
    seen = DeltaTable(path)
    write_deltalake(path, ROWS, mode="append")
    before = entries(path)
    assert not put_next(DeltaLog(path), seen, [added()], LABEL)
    assert entries(path) == before


def test_control_a_name_that_is_not_asked_for_loses_another_writers_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put_over(_: object, path: str, data: bytes) -> None:
        Path(path).write_bytes(data)

    monkeypatch.setattr(LocalFiles, "put_new", put_over)
    with pytest.raises(AssertionError):
        test_a_name_that_is_taken_stays_whose_it_is(tmp_path)


def test_a_log_that_was_replaced_by_a_shorter_one_gets_no_gap(tmp_path: Path) -> None:
    path = made(tmp_path / "table")
    write_deltalake(path, ROWS, mode="append")
    seen = DeltaTable(path)
    Path(DeltaLog(path).entry_path(1)).unlink()
    assert not put_next(DeltaLog(path), seen, [added()], LABEL)
    assert list(entries(path)) == [0]


def test_half_of_a_surrogate_pair_never_comes_into_the_log(tmp_path: Path) -> None:
    path = made(tmp_path / "table")
    with pytest.raises(UnicodeEncodeError):
        put_next(DeltaLog(path), DeltaTable(path), [added()], Label("ours", 1, {"stormproof.refused": "\ud800"}))
    assert names(path) == ["00000000000000000000.json"]


OPTIONS = {"compression": "zstd"}


def with_options(path: Path) -> Path:
    """A table whose file format has options; its first entry."""
    DeltaTable.create(path, Schema.from_arrow(SCHEMA))
    first = Path(DeltaLog(str(path)).entry_path(0))
    first.write_text(first.read_text().replace('"options":{}', f'"options":{json.dumps(OPTIONS)}'))
    return first


@pytest.mark.parametrize("behind", ["an entry", "a checkpoint"])
def test_a_claim_keeps_the_options_of_another_writers_file_format(behind: str, tmp_path: Path) -> None:
    harness = SinkHarness("delta-append", tmp_path, None)
    first, log = with_options(harness.delta_path), DeltaLog(str(harness.delta_path))
    if behind == "a checkpoint":
        add_files(DeltaTable(harness.delta_path), [], CommitProperties())
        DeltaTable(harness.delta_path).create_checkpoint()
        first.unlink()
    assert harness.open().claim(()) == ()
    newest = entries(log.table)[DeltaTable(harness.delta_path).version()]
    (about,) = [action["metaData"] for action in newest if "metaData" in action]
    assert about["format"] == {"provider": "parquet", "options": OPTIONS}


def test_a_restore_of_ours_keeps_them(tmp_path: Path) -> None:
    harness = SinkHarness("delta-fold", tmp_path, None)
    with_options(harness.delta_path)
    session = harness.open()
    for txid in (1, 2):
        prepared = harness.prepare(session, txid, txid - 1 or None, {"a": txid})
        session.commit(prepared, checked=True)
    table = DeltaTable(harness.delta_path)
    (lost,) = table.file_uris()
    Path(lost).unlink()
    assert session.restore_lost(prepared) is not None
    assert DeltaLog(str(harness.delta_path)).file_format(table.version() + 1)["options"] == OPTIONS
    assert harness.rows() == {("a", 1): 1}
    assert session.commit(prepared, checked=True).outcome is CommitOutcome.APPLIED
    assert harness.rows() == {("a", 3): 1}


def test_a_restore_whose_own_files_are_gone_is_refused(tmp_path: Path) -> None:
    harness = SinkHarness("delta-fold", tmp_path, None)
    session = harness.open()
    for txid in (1, 2):
        prepared = harness.prepare(session, txid, txid - 1 or None, {"a": txid})
        session.commit(prepared, checked=True)
    for file in harness.delta_path.glob("*.parquet"):
        file.unlink()
    version = DeltaTable(harness.delta_path).version()
    with pytest.raises(SinkRefused, match=r"cannot be restored: .*parquet is missing"):
        session.restore_lost(prepared)
    assert DeltaTable(harness.delta_path).version() == version


def test_columns_are_not_added_where_they_would_be_lost(tmp_path: Path) -> None:
    with_options(tmp_path / "t")
    more = pa.schema([*SCHEMA, ("more", pa.int64())])
    identity = SinkIdentity("topology", "inc-1", "t")
    sink = DeltaSink(tmp_path / "t", schema_contract="evolve")
    with pytest.raises(SinkRefused, match=r"options \(compression\).*add .*more.* with ALTER TABLE"):
        sink.open(identity, SinkInput(more), 1)
    sink.open(identity, SinkInput(SCHEMA), 1).close()
