"""The one way to files: which implementation has the files at an address."""

from __future__ import annotations

from typing import Final

from stormproof.core.storage.address import is_url
from stormproof.core.storage.local_files import IN_MEMORY, KEPT, NOWHERE, LocalFiles, NoFiles
from stormproof.core.storage.protocol import Files

_LOCAL: Final = LocalFiles()
_NONE: Final = NoFiles()


def files_at(address: str) -> Files:
    """What reads and writes files at an address of a file or folder: a local path, a URL, or below `NOWHERE` or `KEPT`."""
    if is_url(address):
        from stormproof.core.storage.object_files import ObjectFiles, root_of  # an extra: only who has a URL needs it

        return ObjectFiles(root_of(address))
    if address.startswith(KEPT):
        return IN_MEMORY
    return _NONE if address.startswith(NOWHERE) else _LOCAL
