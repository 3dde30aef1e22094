"""The one way to files: which implementation has the files at an address."""

from __future__ import annotations

from typing import Final

from stormproof.core.storage import is_url
from stormproof.sinks.file_store import Files
from stormproof.sinks.local_files import NOWHERE, LocalFiles, NoFiles

_LOCAL: Final = LocalFiles()
_NONE: Final = NoFiles()


def files_at(address: str) -> Files:
    """What reads and writes files at the address of a file or folder: a local path, a URL, or one below `NOWHERE`."""
    if is_url(address):
        from stormproof.sinks.object_files import ObjectFiles, root_of  # an extra: only who has a URL needs it

        return ObjectFiles(root_of(address))
    return _NONE if address.startswith(NOWHERE) else _LOCAL
