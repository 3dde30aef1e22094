"""What a driver leaves behind when it dies: the notes of what its tasks had in hand, in a folder for each job."""

from __future__ import annotations

import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from stormproof.core.pulse.record import RECORD, AttemptKey, Record, most_often

NOTES: Final = "notes"
"""The file in a job's folder in which the driver writes down notes, one record a task."""


@contextmanager
def job_folder(root: Path, key: AttemptKey) -> Generator[Path]:
    """A folder for one attempt's job while the block runs; it remains where the driver dies."""
    folder = root / ".".join(map(str, key))
    # It exists already where an earlier driver died during the same attempt.
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)  # its notes name messages
    folder.chmod(0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def suspects_of_dead(root: Path | None, incarnation: str, txid: int) -> tuple[int, ...]:
    """As `most_often`, over all attempts at a batch whose driver died while its job ran.

    Empty where the tasks made no notes, or the folders are gone.
    """
    if root is None:
        return ()
    return most_often(record for folder in root.glob(f"{incarnation}.{txid}.*") for record in _records(folder))


def sweep(root: Path | None, incarnation: str) -> None:
    """Remove the folders that dead drivers of this incarnation left. Call it after reading their suspects."""
    for folder in () if root is None else sorted(root.glob(f"{incarnation}.*")):
        shutil.rmtree(folder, ignore_errors=True)


def _records(folder: Path) -> Iterator[Record]:
    try:
        content = (folder / NOTES).read_bytes()
    except FileNotFoundError:
        return
    whole = len(content) - len(content) % RECORD.size  # the rest was being written
    yield from RECORD.iter_unpack(content[:whole])  # pyright: ignore[reportReturnType]
