"""Folders of this user's own, for what is fetched or made once and used by every project."""

from __future__ import annotations

import os
from pathlib import Path

from stormproof.core.errors import SettingsError
from stormproof.core.trust import require_trusted


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/stormproof`, else `~/.cache/stormproof`; it need not be there.

    Raises:
        SettingsError: this user has no home folder, or another user could write what is in the folder.
    """
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        folder = (Path(given) if Path(given).is_absolute() else Path.home() / ".cache") / "stormproof"
    except RuntimeError as error:
        raise SettingsError(
            "this user has no home folder; set HOME or XDG_CACHE_HOME to a folder of its own"
        ) from error
    if folder.exists():
        require_trusted(folder, "programs are run from it", "or set XDG_CACHE_HOME to a folder of your own")
    return folder
