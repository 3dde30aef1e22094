"""Whether a file is the one that was registered: by its content, where size and time do not settle it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa

from stormproof.core.source.files.formats import File, changed, check_unchanged, digests_now, gone, scan
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import FileState

log = logging.getLogger("stormproof.source")

_LIKE_ONE_THAT_WAS_READ: Final = (
    "file %s has the size and the time of %s, which was read and is gone: it is read as a new file. If it is that file "
    "under another name, its messages come a second time"
)


def as_registered(file: File, schema: pa.Schema, listed: FileState | None, *, needed: bool) -> File:
    """A registered file as it is now: with its present time, and digests of the columns that are read now.

    `listed` is what a search for files found under its path. It is read again where its time has changed. `needed` is off
    where all of its messages are resolved: then it may be gone.

    Raises:
        PositionMismatch: its content has changed, or it is gone and needed.
    """
    now = files_at(file.path).stat(file.path) if listed is None and needed else listed
    if now is None:
        if needed:
            raise gone(file.path)
        return file
    is_same = (now.size, now.modified_ns) == (file.size_bytes, file.modified_ns)
    columns = tuple(schema.names) if file.format == "parquet" else ()
    if is_same and (not needed or file.digested == columns):
        return file
    check_unchanged(file.path, now, file.size_bytes, None)
    found = scan(file.path, file.format, schema)
    if file.digested != found.digested:  # other columns are read now
        same = file.fingerprint == found.fingerprint and digests_now(file) == file.digests
    else:
        same = _same_content(file, found)
    if not same:
        then = f"{file.size_bytes} bytes, modified at {file.modified_ns} ns, hash {file.fingerprint[:16]}"
        told = f"other content in as many bytes, modified at {now.modified_ns} ns, hash {found.fingerprint[:16]}"
        raise changed(file.path, then, told)
    return replace(
        file,
        modified_ns=now.modified_ns,
        fingerprint=found.fingerprint,
        digests=found.digests,
        digested=found.digested,
    )


def renamed_from(files: Sequence[File], path: str, now: FileState, schema: pa.Schema, lowest: int) -> int | None:
    """The place of the registered file that `path` is under a new name; None where it is a new file.

    A renamed file has the size, the time and the content of a registered file that is gone, and of whose messages some are
    not resolved: `lowest` is the first such message. A new file, too, may have all three of one whose messages are resolved,
    so that one is not guessed at: its messages would be lost. A copy has another time, and is a new file. An object store
    has no renaming: what is there under a new name was put there.
    """
    store = files_at(path)
    if not store.is_local:
        return None
    for place, file in enumerate(files):
        if (file.size_bytes, file.modified_ns) != (now.size, now.modified_ns) or store.stat(file.path) is not None:
            continue
        if file.stop_id <= lowest:
            log.warning(_LIKE_ONE_THAT_WAS_READ, path, file.path)
        elif _same_content(file, scan(path, file.format, schema)):
            return place
    return None


def _same_content(registered: File, found: File) -> bool:
    return (registered.fingerprint, registered.digests, registered.digested) == (
        found.fingerprint,
        found.digests,
        found.digested,
    )
