"""Fixtures of several integration tests: a topology that an operator works on, functions for `foreachBatch`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database
from stormproof.errors import Fenced
from stormproof.trident.streaming.foreach_batch import ForeachBatch
from support.command_line import CommandLine
from support.crashes import Cell
from support.operated import Operated
from support.queues import prepared_database
from support.streams import ArrowFrames, OnBatch, Opener, StreamCell, function_of


@pytest.fixture
def operated(
    request: pytest.FixtureRequest,
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Operated:
    """A topology and a queue that are called as the module's `NAME` says, in a database that commands find."""
    name: str = request.module.NAME
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    return Operated(Cell(name, None, Guarantee.EXACTLY_ONCE, tmp_path, prepared_database(database), name, 4), capsys)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command line, in this process."""
    return CommandLine(capsys)


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Makes functions for `foreachBatch`, and closes what they leave open."""
    made: list[ForeachBatch] = []

    def make(cell: StreamCell, frames: ArrowFrames | None = None, on_batch: OnBatch = None) -> ForeachBatch:
        made.append(function_of(cell, frames or ArrowFrames(), on_batch))
        return made[-1]

    yield make
    for function in made:
        with suppress(Fenced):
            function.close()
