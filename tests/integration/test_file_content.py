"""A registered file is known by its content: size and time prove nothing, and cost nothing where the content is the same."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.queues import prepared_database

from stormproof import FileSource
from stormproof.core.base.errors import PositionMismatch
from stormproof.core.contract.source import Lease, Limit, Slice
from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.core.source.files import formats
from stormproof.core.source.files import reader as reading
from stormproof.core.source.files.entries import renamed_from
from stormproof.core.source.files.formats import FORMATS, Format
from stormproof.core.storage.files import LocalFiles
from stormproof.testing import Message

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]

ROWS: Final = 4_000
"""Four blocks of lines, four row groups."""

HALF: Final = ROWS // 2
CHANGED: Final = "has changed since it was registered"
_names = count(1)


@pytest.fixture(scope="module")
def store(postgres: EmbeddedPostgres) -> Iterator[Database]:
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute("create database file_content template template0")
    yield prepared_database(postgres.database.with_name("file_content"))
    with connect(postgres.database, application_name="tests", autocommit=True) as connection:
        connection.execute("drop database file_content with (force)")


def write(path: Path, format_: Format, numbers: list[int]) -> None:
    """Rows of one width: another order has the same size, and in Parquet the same footer."""
    match format_:
        case "parquet":
            table = pa.table({"n": pa.array(numbers, pa.int64()), "m": pa.array(numbers, pa.int64())})
            new = path.with_name(f".{path.name}")
            pq.write_table(
                table, new, row_group_size=1_000, use_dictionary=False, compression="none", write_statistics=False
            )
            path.write_bytes(new.read_bytes())  # in place
            new.unlink()
        case "jsonl":
            path.write_text("".join(f'{{"n": {n:08d}}}\n'.replace(": 0", ":  ") for n in numbers), encoding="utf-8")
        case "text":
            path.write_text("".join(f"{n:08d}\n" for n in numbers), encoding="utf-8")


class Files:
    """A folder with one file, read by one subscription."""

    def __init__(self, store: Database, folder: Path, format_: Format) -> None:
        self.format: Format = format_
        self.path = folder / f"rows.{format_}"
        self.store = store
        self.name = f"rows{next(_names)}"
        self.numbers = [10_000_000 + n for n in range(ROWS)]
        write(self.path, format_, self.numbers)
        self.source = self.subscribed()
        self.owner = 0

    def subscribed(self, schema: str | None = None) -> FileSource:
        schema = schema or ("line string" if self.format == "text" else "n bigint")
        source = FileSource(
            self.path.parent,
            self.format,
            schema=schema,
            name=self.name,
            database=self.store,
            look_interval_s=0.0,
            backoff_base_s=0.0,
        )
        source.subscribe("s", 1)
        return source

    def open(self, messages: int = ROWS) -> Slice:
        self.owner += 1
        slice_ = self.source.open(Lease(str(self.owner), 1), Limit(messages), 7)
        assert slice_ is not None
        return slice_

    def read(self, slice_: Slice) -> list[int]:
        found: list[int] = []
        for reader in self.source.readers(slice_, 2):
            for batch in reader.read(7, frozenset(), 500):
                found += [
                    int(v) for v in self.source.decoder.decode(batch.column("payload")).rows.column(0).to_pylist()
                ]
        return found

    def reordered(self, *, keep_time: bool) -> None:
        """Rewritten in place, its halves the other way round."""
        before = os.stat(self.path)
        write(self.path, self.format, self.numbers[HALF:] + self.numbers[:HALF])
        assert os.stat(self.path).st_size == before.st_size
        if keep_time:
            os.utime(self.path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.fixture(params=FORMATS)
def files(request: pytest.FixtureRequest, store: Database, tmp_path: Path) -> Iterator[Files]:
    made = Files(store, tmp_path, request.param)
    yield made
    made.source.close()


@pytest.mark.parametrize("keep_time", [True, False])
def test_a_file_that_is_rewritten_with_its_rows_in_another_order_is_refused_at_every_moment(
    files: Files, keep_time: bool
) -> None:
    slice_ = files.open(HALF)
    assert files.read(slice_) == files.numbers[:HALF]
    files.reordered(keep_time=keep_time)
    with pytest.raises(PositionMismatch, match=CHANGED) as refused:
        files.read(slice_)  # another attempt at the same slice
    assert str(files.path) in refused.value.message
    assert "put the old one back" in refused.value.message
    with pytest.raises(PositionMismatch, match=CHANGED):
        files.read(files.open())  # the next slice: refused when it is opened, or when it is read
    failed = [Message(id=5, origin=1, token=0, payload=b"").failed()]
    with pytest.raises(PositionMismatch, match=CHANGED):
        files.source.confirm(Lease("1", 1), failed)  # whose payload would be another's
    write(files.path, files.format, files.numbers)
    files.source.confirm(Lease("1", 1))
    files.source.abort(Lease("2", 1))
    assert files.read(files.open()) == files.numbers[HALF:]


def test_a_file_that_is_rewritten_between_registration_and_its_first_read_is_refused(files: Files) -> None:
    slice_ = files.open()
    files.reordered(keep_time=True)
    with pytest.raises(PositionMismatch, match=CHANGED):
        files.read(slice_)


def test_control_without_digests_another_order_is_read_as_the_same(
    files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    slice_ = files.open()
    files.reordered(keep_time=True)
    for module in (formats, reading):
        monkeypatch.setattr(module, "require_content", lambda *_: None)
    found: list[int] = []
    for reader in files.source.readers(slice_, 1):
        for batch in reader.read(7, frozenset(), 500):
            found += [int(v) for v in files.source.decoder.decode(batch.column("payload")).rows.column(0).to_pylist()]
    assert found != files.numbers
    assert sorted(found) == files.numbers


def shorter(files: Files) -> None:
    os.truncate(files.path, os.stat(files.path).st_size - 100)


def longer(files: Files) -> None:
    with open(files.path, "ab") as file:
        file.write(b"20000000\n")


def another_in_its_place(files: Files) -> None:
    new = files.path.with_name(".new")
    write(new, files.format, files.numbers[::-1])
    new.rename(files.path)


@pytest.mark.parametrize("change", [shorter, longer, another_in_its_place])
def test_a_file_that_is_truncated_appended_to_or_replaced_is_refused(
    files: Files, change: Callable[[Files], None]
) -> None:
    slice_ = files.open(HALF)
    change(files)
    with pytest.raises(PositionMismatch, match=CHANGED):
        files.read(slice_)
    with pytest.raises(PositionMismatch, match=CHANGED):
        files.open()


def touched(files: Files) -> None:
    os.utime(files.path)


def copied_over(files: Files) -> None:
    new = files.path.with_name(".new")
    shutil.copyfile(files.path, new)
    new.rename(files.path)


def written_again(files: Files) -> None:
    write(files.path, files.format, files.numbers)


@pytest.mark.parametrize("change", [touched, copied_over, written_again])
def test_a_file_with_the_same_content_goes_on(files: Files, change: Callable[[Files], None]) -> None:
    slice_ = files.open(HALF)
    change(files)
    assert files.read(slice_) == files.numbers[:HALF]
    assert files.read(files.open()) == files.numbers[HALF:]


def test_a_file_that_is_renamed_keeps_its_messages_and_a_copy_is_another_file(files: Files) -> None:
    assert files.read(files.open(HALF)) == files.numbers[:HALF]
    moved = files.path.with_name(f"moved.{files.format}")
    files.path.rename(moved)
    assert files.read(files.open()) == files.numbers[HALF:]
    assert files.source.place_of(HALF) == (str(moved), HALF)
    shutil.copyfile(moved, files.path)
    assert Counter(files.read(files.open())) == Counter(files.numbers)  # each path is a file of its own


def put_in_place_of_one_that_was_read(files: Files) -> Path:
    """The next file of a producer that writes alike ones, where times are of whole seconds."""
    assert files.read(files.open()) == files.numbers
    files.source.confirm(Lease("1", 1))
    before = os.stat(files.path)
    files.path.unlink()
    after = files.path.with_name(f"next.{files.format}")
    write(after, files.format, files.numbers)
    os.utime(after, ns=(before.st_atime_ns, before.st_mtime_ns))
    return after


def test_a_new_file_that_is_like_one_that_was_read_and_is_gone_is_read(
    files: Files, caplog: pytest.LogCaptureFixture
) -> None:
    after = put_in_place_of_one_that_was_read(files)
    assert files.read(files.open()) == files.numbers
    assert files.source.place_of(ROWS) == (str(after), 0)
    assert f"{after} has the size and the time of {files.path}" in caplog.text


def test_control_guessed_to_be_renamed_it_is_never_read(files: Files) -> None:
    after = put_in_place_of_one_that_was_read(files)
    state = LocalFiles().stat(str(after))
    assert state is not None
    all_needed = renamed_from(files.source._files, str(after), state, files.source._schema, 0)  # pyright: ignore[reportPrivateUsage]
    assert all_needed == 0, "the new file would be the place of the one that was read"


def test_digests_follow_the_columns_that_are_read(store: Database, tmp_path: Path) -> None:
    files = Files(store, tmp_path, "parquet")
    assert files.read(files.open(HALF)) == files.numbers[:HALF]
    files.source.close()
    files.source = files.subscribed("n bigint, m bigint")
    slice_ = files.open(1_000)
    assert files.read(slice_) == files.numbers[HALF : HALF + 1_000]
    swapped = pa.table({"n": pa.array(files.numbers, pa.int64()), "m": pa.array(files.numbers[::-1], pa.int64())})
    before = os.stat(files.path)
    pq.write_table(
        swapped, files.path, row_group_size=1_000, use_dictionary=False, compression="none", write_statistics=False
    )
    os.utime(files.path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(PositionMismatch, match=CHANGED):
        files.read(files.open())
    files.source.close()
