"""Metrics as a file, in the format of node exporter's textfile collector: for batch jobs, which nobody scrapes in time."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from prometheus_client import CollectorRegistry

from stormproof.core.errors import SettingsError
from stormproof.core.forks import process_life
from stormproof.trident.metrics.book import Book
from stormproof.trident.metrics.exposition import registry_of, text_of

log = logging.getLogger("stormproof.metrics")

_files: dict[Path, TextFile] = {}
_lock = threading.Lock()
_REFUSED: Final = (
    "metrics_file {path} cannot be written: {why}; nothing was started. Name another one, or make its folder"
)


def write_text(path: Path, registry: CollectorRegistry) -> None:
    """Write the file anew; a reader sees the old one or the new one, whole.

    Raises:
        OSError: it cannot be written.
    """
    replace_text(path, text_of(registry))


def replace_text(path: Path, text: str) -> None:
    """Replace a file's text; a reader sees the old one or the new one, whole. Not durable: a power loss may take it.

    Raises:
        OSError: it cannot be written.
    """
    # Not `.prom` at its end, so that the collector does not read it.
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise


class TextFile:
    """One file and the books that are written to it, every `interval_s` seconds and at the end. Made by `keep_written`."""

    def __init__(self, path: Path, interval_s: float) -> None:
        self.books: list[Book] = []
        self._path = path
        self._interval_s = interval_s
        self._registry = registry_of(lambda: tuple(self.books))
        self._writing = threading.Lock()
        self._is_failing = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="stormproof-metrics-file", daemon=True)

    def begin(self) -> None:
        """Write it for the first time, and go on.

        Raises:
            SettingsError: it cannot be written.
        """
        try:
            write_text(self._path, self._registry)
        except OSError as error:
            why = error.strerror or str(error)
            raise SettingsError(
                _REFUSED.format(path=self._path, why=why), setting="metrics_file", path=str(self._path)
            ) from error
        self._thread.start()

    def write(self) -> None:
        """Write it now. A file that cannot be written does not end a run: it is said once, and tried again."""
        with self._writing:
            try:
                write_text(self._path, self._registry)
            except OSError as error:
                if not self._is_failing:
                    log.warning("metrics_file %s cannot be written, and is out of date: %s", self._path, error)
                self._is_failing = True
            else:
                self._is_failing = False

    def end(self) -> None:
        """Stop writing."""
        self._done.set()
        self._thread.join()

    def _keep(self) -> None:
        while not self._done.wait(self._interval_s):
            self.write()


def keep_written(path: Path, interval_s: float, book: Book) -> tuple[Callable[[], None], Callable[[], None]]:
    """Have a book written to a file every so many seconds. Returns what writes it now, and what writes it last.

    Runs of one process that name the same file share it; the first one's interval counts. Two processes need two files.

    Raises:
        SettingsError: the file cannot be written.
    """
    path = path.absolute()
    life = process_life()
    with _lock:
        file = _files.get(path)
        if file is None:
            file = TextFile(path, interval_s)
            file.books.append(book)
            file.begin()
            _files[path] = file
        else:
            file.books.append(book)

    def end() -> None:
        if process_life() != life:
            return
        file.write()
        with _lock:
            file.books.remove(book)
            if file.books:
                return
            del _files[path]
        file.end()

    return file.write, end


def _in_fork() -> None:
    global _lock
    _lock = threading.Lock()
    _files.clear()


os.register_at_fork(after_in_child=_in_fork)
