"""Power losses: what a folder is after the machine went off, when only what was fsynced is sure to be there.

While a driver runs, every fsync of its process is written down with what it made durable: a file's bytes, or a folder's
names, at that instant. All the writing is seen through it, also that of delta-rs and pyarrow in native code: what nobody
synced is not durable, whoever wrote it. (delta-rs 1.6 and pyarrow 25 sync nothing, as strace shows; did they, the picture
here would be darker than the disk, never brighter.) Names and bytes are kept apart, as on a disk: a folder that was synced
may name a file that was not, and which is then empty.
"""

from __future__ import annotations

import json
import os
import random
import resource
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from support.crashes import Cell


@dataclass(frozen=True, slots=True)
class Entry:
    """What a name in a folder stands for."""

    inode: int
    is_folder: bool


@dataclass(slots=True)
class Image:
    """Folders and files by inode. What a folder names and has no content of was never synced."""

    folders: dict[int, dict[str, Entry]] = field(default_factory=dict[int, dict[str, Entry]])
    files: dict[int, bytes] = field(default_factory=dict[int, bytes])

    @staticmethod
    def of(top: Path, names: tuple[str, ...]) -> Image:
        """What a folder looks like now, as far as these names in it go."""
        image = Image()
        waiting = [top]
        while waiting:
            folder = waiting.pop()
            found = entries(folder, names if folder == top else None)
            image.folders[os.stat(folder).st_ino] = found
            for name, entry in found.items():
                if entry.is_folder:
                    waiting.append(folder / name)
                elif entry.inode not in image.files:
                    image.files[entry.inode] = (folder / name).read_bytes()
        return image


def entries(folder: str | Path | int, names: tuple[str, ...] | None = None) -> dict[str, Entry]:
    """A folder's names (None: all)."""
    with os.scandir(folder) as found:
        return {
            e.name: Entry(e.inode(), e.is_dir(follow_symlinks=False)) for e in found if names is None or e.name in names
        }


class _Recording:
    """In the driver's process: writes down what each fsync made durable. Nothing is really synced, to save time."""

    def __init__(self, top: Path, names: tuple[str, ...], journal: Path) -> None:
        self._top, self._names = os.path.realpath(top), names
        self._journal = os.open(journal, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND, 0o600)
        self._blobs = journal.parent
        self._number = 0
        self._lock = threading.Lock()
        self._held: set[int] = set()
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        for name in names:
            for folder, folders, files in os.walk(os.path.join(self._top, name)):
                for path in (folder, *(os.path.join(folder, one) for one in (*folders, *files))):
                    self._hold(path)

    def fsync(self, fd: int) -> None:
        """What stands for `os.fsync`."""
        path = os.path.realpath(f"/proc/self/fd/{fd}")
        if path != self._top and not path.startswith(tuple(os.path.join(self._top, name) for name in self._names)):
            return
        with self._lock:  # jobs and a commit may sync side by side
            self._record(fd, path)

    def _record(self, fd: int, path: str) -> None:
        inode = os.fstat(fd).st_ino
        self._hold(path)
        if os.path.isdir(path):
            found = entries(path, self._names if path == self._top else None)
            for name in found:
                self._hold(os.path.join(path, name))
            shown = {name: [entry.inode, entry.is_folder] for name, entry in found.items()}
            self._write({"folder": inode, "entries": shown})
            return
        self._number += 1
        blob = self._blobs / f"blob-{self._number}"
        with open(f"/proc/self/fd/{fd}", "rb") as file:
            blob.write_bytes(file.read())
        self._write({"file": inode, "blob": blob.name})

    def _write(self, line: object) -> None:
        os.write(self._journal, f"{json.dumps(line)}\n".encode())

    def _hold(self, path: str) -> None:
        """An inode that is held is never given to another file, so that its number means one thing all along."""
        try:
            fd = os.open(path, os.O_PATH | os.O_NOFOLLOW)
        except FileNotFoundError:
            return
        inode = os.fstat(fd).st_ino
        if inode in self._held:
            os.close(fd)
        self._held.add(inode)


@dataclass(frozen=True, slots=True)
class Recorder:
    """Called in the driver's process before it runs: `Cell.sabotage`. May break the code there first."""

    top: Path
    names: tuple[str, ...]
    journal: Path
    sabotage: Callable[[], None] | None = None

    def __call__(self) -> None:
        if self.sabotage is not None:
            self.sabotage()
        module: Any = os
        module.fsync = _Recording(self.top, self.names, self.journal).fsync


@dataclass(slots=True)
class Disk:
    """A cell's folders on a machine that can go off."""

    cell: Cell
    names: tuple[str, ...] = ("lake", "home")
    _before: Image = field(default_factory=Image)

    @property
    def _journal(self) -> Path:
        return self.cell.folder / "power" / "journal"

    def recording(self) -> Cell:
        """The cell, for a driver that is recorded. What lies there now is taken to be on the disk."""
        folder = self._journal.parent
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        self._before = Image.of(self.cell.folder, self.names)
        recorder = Recorder(self.cell.folder, self.names, self._journal, self.cell.sabotage)
        return replace(self.cell, sabotage=recorder)

    def go_off(self, luck: random.Random | None = None) -> list[str]:
        """The driver is gone, and so is the power: what was not synced is lost, and a name that was lost loses all below.

        With `luck` each thing that was not synced may have survived by itself: a name that came, went or changed, a file's
        bytes, whole, cut short, or as zeros. Returns the paths of which something is not as the driver left it.
        """
        durable, current = self._durable(), Image.of(self.cell.folder, self.names)
        aside = self.cell.folder / "before-power-loss"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir()
        for name in self.names:
            if (self.cell.folder / name).exists():
                (self.cell.folder / name).rename(aside / name)
        top = os.stat(self.cell.folder).st_ino
        changed: list[str] = []
        self._rebuild(self.cell.folder, Entry(top, True), durable, current, luck, changed)
        return [os.path.relpath(path, self.cell.folder) for path in changed]

    def _durable(self) -> Image:
        image = Image(dict(self._before.folders), dict(self._before.files))
        for text in self._journal.read_text().splitlines():
            line = json.loads(text)
            if "folder" in line:
                image.folders[line["folder"]] = {name: Entry(*entry) for name, entry in line["entries"].items()}
            else:
                image.files[line["file"]] = (self._journal.parent / line["blob"]).read_bytes()
        return image

    def _rebuild(
        self, path: Path, entry: Entry, durable: Image, current: Image, luck: random.Random | None, changed: list[str]
    ) -> None:
        if not entry.is_folder:
            now, then = current.files.get(entry.inode), durable.files.get(entry.inode, b"")
            content = then if luck is None or now is None else luck.choice(_variants(now, then, luck))
            if content != now:
                changed.append(str(path))
            path.write_bytes(content)
            return
        path.mkdir(exist_ok=True)
        was, is_ = durable.folders.get(entry.inode, {}), current.folders.get(entry.inode, {})
        for name in sorted({*was, *is_}):
            chosen = was.get(name) if luck is None else luck.choice([was.get(name), is_.get(name)])
            if chosen != is_.get(name):
                changed.append(str(path / name))
            if chosen is not None:
                self._rebuild(path / name, chosen, durable, current, luck, changed)


def _variants(now: bytes, then: bytes, luck: random.Random) -> list[bytes]:
    if now == then:
        return [now]
    return [
        now,
        now,
        then,
        now[: luck.randrange(len(now) + 1)],
        bytes(len(now)),
        bytes(len(now) // 2) + now[len(now) // 2 :],
    ]
