"""Files to read and prepared files in an object store: patterns, changed objects, killed drivers, micro-batches."""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from contextlib import closing
from pathlib import Path

import obstore
import psycopg
import pytest
from support.brokers.object_store import ObjectStore
from support.crashes import KILLED, Cell, run_driver
from support.lossy_store import Loss, LossyStore
from support.queues import prepared_database
from support.stream_chain import require_exact
from support.stream_driver import run_files_on_spark
from support.streams import Form, StreamCell, put_file
from support.topologies import Split, expected, messages
from support.verdicts import require_verified

from stormproof import FileSource, PostgresSink, Topology, count
from stormproof.core.base.errors import PositionMismatch, UsageError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.postgres.database import Database
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import use_storage

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(300)]

PLACE = "place.json"


def put(server: ObjectStore, prefix: str, name: str, payloads: list[bytes]) -> None:
    obstore.put(server.store(), f"{prefix}/{name}", b"".join(line + b"\n" for line in payloads))


def names(server: ObjectStore, prefix: str) -> list[str]:
    return sorted(meta["path"] for chunk in obstore.list(server.store(), prefix=prefix) for meta in chunk)


@pytest.fixture
def place(object_store: ObjectStore) -> tuple[ObjectStore, str, str]:
    """The server, a prefix in its bucket, and the prefix's URL."""
    prefix = uuid.uuid4().hex
    url = f"{object_store.url}/{prefix}"
    use_storage(url, object_store.options())
    return object_store, prefix, url


@pytest.mark.parametrize(
    ("pattern", "found"),
    [
        ("", ["a.txt", "b.csv"]),
        ("/", ["a.txt", "b.csv"]),
        ("/a.txt", ["a.txt"]),
        ("/*.txt", ["a.txt"]),
        ("/**/*.txt", ["a.txt", "in/c.txt", "in/deep/d.txt"]),
        ("/in/**", ["in/c.txt", "in/deep/d.txt"]),
        ("/i*/*", ["in/c.txt"]),
        ("/nothing", []),
    ],
)
def test_a_pattern_finds_what_it_finds_on_a_disk(
    place: tuple[ObjectStore, str, str], tmp_path: Path, pattern: str, found: list[str]
) -> None:
    server, prefix, url = place
    for name in ("a.txt", "b.csv", "in/c.txt", "in/deep/d.txt", "in/.hidden/e.txt", ".f.txt"):
        put(server, prefix, name, [b"x"])
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("x")
    here = f"{tmp_path}{pattern}"
    assert sorted(files_at(url).find(url + pattern)) == [f"{url}/{name}" for name in found]
    on_disk = sorted(os.path.relpath(path, tmp_path) for path in files_at(here).find(here))
    assert on_disk == found


def test_an_object_that_was_changed_is_refused_by_its_content(
    place: tuple[ObjectStore, str, str], database: Database
) -> None:
    """As large as before and, as the store tells it, of the same second."""
    server, prefix, url = place
    put(server, prefix, "a.txt", [b"one", b"two"])
    source = FileSource(f"{url}/*.txt", "text", database=prepared_database(database), look_interval_s=0)
    with closing(source):
        source.subscribe("s", 1)
        source.look(1)
        slice_ = source.open(Lease("a", 1), Limit(10, 1 << 20), 7)
        assert slice_ is not None
        put(server, prefix, "a.txt", [b"two", b"one"])
        (reader,) = source.readers(slice_, 1)
        with pytest.raises(PositionMismatch, match=rf"{url}/a.txt has changed"):
            list(reader.read(1, frozenset(), 10))


def read_whole(source: FileSource, owner: str) -> list[bytes]:
    """What is new is read and confirmed."""
    source.look(1)
    slice_ = source.open(Lease(owner, 1), Limit(10, 1 << 20), 7)
    assert slice_ is not None
    found = [
        line
        for reader in source.readers(slice_, 1)
        for rows in reader.read(1, frozenset(), 10)
        for line in rows.column("payload").to_pylist()
    ]
    source.confirm(Lease(owner, 1))
    return found


def test_an_object_under_a_new_name_is_a_new_one_whatever_it_is_like(
    place: tuple[ObjectStore, str, str], database: Database
) -> None:
    """A store has no renaming; its times are of whole seconds, and the tag of an object is often that of its content."""
    server, prefix, url = place
    source = FileSource(f"{url}/*.txt", "text", database=prepared_database(database), look_interval_s=0)
    with closing(source):
        source.subscribe("s", 1)
        for number in range(3):
            put(server, prefix, f"{number}.txt", [b"beat"])
            assert read_whole(source, str(number)) == [b"beat"]
            obstore.delete(server.store(), f"{prefix}/{number}.txt")


def test_an_object_that_was_replaced_after_it_was_read_is_refused(
    place: tuple[ObjectStore, str, str], database: Database
) -> None:
    server, prefix, url = place
    put(server, prefix, "a.txt", [b"one"])
    source = FileSource(f"{url}/*.txt", "text", database=prepared_database(database), look_interval_s=0)
    with closing(source):
        source.subscribe("s", 1)
        assert read_whole(source, "1") == [b"one"]
        source.look(1)
        put(server, prefix, "a.txt", [b"one", b"never read"])
        with pytest.raises(PositionMismatch, match=rf"{url}/a.txt has changed"):
            source.look(1)


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("ftp://host/folder", "ftp:// is not served"),
        ("s3://key:secret@bucket/folder", "user or a password"),
        ("s3://bucket", "names no folder"),
        ("s3://bucket/a?.parquet", "query"),
    ],
)
def test_an_address_that_cannot_be_served_is_refused_by_name(address: str, why: str) -> None:
    with pytest.raises(UsageError, match=why) as refused:
        FileSource(address)
    assert "secret" not in str(refused.value)


def build(cell: Cell) -> Topology:
    """Lines of objects, counted and kept in Postgres, by prepared files in the store."""
    told = json.loads((cell.folder / PLACE).read_text())
    use_storage(told["url"], told["options"])
    source = FileSource(
        f"{told['url']}/input/*.txt",
        "text",
        name="lines",
        database=cell.database,
        max_attempts=3,
        backoff_base_s=0.001,
    )
    t = Topology(cell.name)
    words = t.stream("lines", source).flat_map(Split(cell.folder), "line", schema="word string")
    words.into(PostgresSink("words", name="append", database=cell.database, staging=f"{told['url']}/staging/append"))
    words.group_by("word").persistent_aggregate(n=count()).into(
        PostgresSink("counts", name="fold", database=cell.database, staging=f"{told['url']}/staging/fold")
    )
    return t


def contents(cell: Cell) -> list[Counter[str]]:
    with psycopg.connect(cell.database.adbc_uri) as connection:
        rows = connection.execute("select word from words").fetchall()
        counts = connection.execute("select word, n from counts").fetchall()
    return [Counter(word for (word,) in rows), Counter(dict(counts))]


POINTS = ("task.after_file", "prepare.after", "postgres.after_rows", "postgres.after_commit", "finish.after")


@pytest.mark.parametrize("lossy", [False, True], ids=["", "answers-lost"])
def test_drivers_killed_over_files_in_a_store_are_exact_and_leave_nothing_there(
    place: tuple[ObjectStore, str, str], database: Database, tmp_path: Path, *, lossy: bool
) -> None:
    """With `lossy` the store's answer to each driver's first prepared file is lost, too: its client puts it again."""
    server, prefix, url = place
    given: list[bytes] = []
    cell = Cell("stored", None, Guarantee.EXACTLY_ONCE, tmp_path, prepared_database(database), "q", build=build)
    with LossyStore(server.port) as proxy:
        told = {"url": url, "options": server.options(proxy.port)}
        (tmp_path / PLACE).write_text(json.dumps(told))
        for number, point in enumerate(POINTS):
            lines = messages(8, f"{number}x")
            put(server, prefix, f"input/{number}.txt", lines)
            given += lines
            if lossy:
                proxy.lose(Loss.ANSWER, 1, "PUT", r"stormproof-[^/]*\.parquet")
            assert run_driver(cell, f"{point}=kill") == KILLED
        assert run_driver(cell) == 0
        assert not lossy or proxy.lost > 0
        require_verified(cell)
    assert contents(cell) == [expected(given)] * 2
    assert names(server, f"{prefix}/staging") == []


@pytest.mark.sampled(0.3, pool="long")
@pytest.mark.spark(own=True)
def test_micro_batches_staged_in_a_store_are_taken_once(
    place: tuple[ObjectStore, str, str], database: Database, tmp_path: Path
) -> None:
    """By the settings alone; the driver dies when a micro-batch is in the store, and not registered yet."""
    server, prefix, url = place
    cell = StreamCell("stored-stream", Form.TOPOLOGY, tmp_path, prepared_database(database))
    cell.staging.write_text(json.dumps({"staging_dir": url, "storage_options": server.options()}))
    lines = ["a", "bb", "cc", "d"]
    for pair in (lines[:2], lines[2:]):
        put_file(cell.folder, pair)
    assert run_files_on_spark(cell, "stream.before_register=kill@2") == KILLED
    assert any(path.endswith(".parquet") for path in names(server, prefix))
    assert run_files_on_spark(cell) == 0
    require_exact(cell, lines)
    assert names(server, prefix) == []
