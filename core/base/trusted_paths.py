"""Paths that only this user or root can have written: how one is checked, and the user's cache folder.

What another user could have written must not decide what this process runs.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from pathlib import Path

from stormproof.core.base.errors import SettingsError


def distrust(path: Path) -> str | None:
    """Why another user could have written what is at `path`; None where only this user or root could.

    Both a symbolic link and what it leads to are checked. A path that a group may write is trusted where the group is the
    user's private one, as many distributions make it.

    Raises:
        OSError: it does not exist, or this user may not look at it.
    """
    link, found = path.lstat(), path.stat()
    for each in (link, found):
        if each.st_uid not in (os.geteuid(), 0):
            return f"it belongs to user {_user_name(each.st_uid)}"
    if found.st_mode & stat.S_IWOTH:
        return "every user may write it"
    if found.st_mode & stat.S_IWGRP and not _is_private_group(found.st_gid):
        return f"the group {_group_name(found.st_gid)} may write it"
    return None


def require_trusted(path: Path, what: str, instead: str) -> None:
    """Refuse what another user could have put there.

    Raises:
        SettingsError: names the path, why it is not trusted, and two ways on; `instead` is the second one.
        OSError: as `distrust`.
    """
    reason = distrust(path)
    if reason is not None:
        user = _user_name(os.geteuid())
        raise SettingsError(
            f"{path} is not used: {reason}, and {what}; if you trust what is in it, make it yours: "
            f"chown -R {user} {path} && chmod -R go-w {path}; {instead}",
            path=str(path),
            reason=reason,
        )


def user_cache() -> Path:
    """`$XDG_CACHE_HOME/stormproof`, else `~/.cache/stormproof`; it need not exist.

    Raises:
        SettingsError: this user has no home folder, or another user could have written what is in the folder.
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


def _is_private_group(gid: int) -> bool:
    """Whether this is the group that has the user's own name, and no further member."""
    try:
        name, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return group.gr_name == name and set(group.gr_mem) <= {name}


def _user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group_name(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
