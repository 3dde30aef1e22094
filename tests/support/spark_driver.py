"""A driver on Spark, as a process of its own: a Spark session cannot be forked.

``python spark_driver.py CELL`` with the cell as JSON; failpoints come by the environment.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from stormproof import Topology
from stormproof.core.base.failpoint import ENV, ENV_LOG
from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database
from support.crashes import Cell, drive_and_exit
from support.topologies import SinkMode

TIMEOUT_S = 240


class SparkDriver:
    """A driver's process, with what `support.crashes.Driver` asks of it."""

    def __init__(self, cell: Cell, environment: Mapping[str, str]) -> None:
        fields = {
            **asdict(cell),
            "folder": str(cell.folder),
            "build": None if cell.build is None else f"{cell.build.__module__}:{cell.build.__qualname__}",
            "database": cell.database.sqlalchemy_url.render_as_string(hide_password=False),
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, json.dumps(fields)],
            env={**os.environ, **environment, "PYTHONPATH": str(Path(__file__).parents[1])},
            # In a process group of its own: Spark's JVM follows its driver within seconds of the driver's death.
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exitcode(self) -> int | None:
        return self._process.poll()

    def join(self, timeout: float | None = None) -> None:
        """Wait for its end, and no longer than this (seconds)."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)

    def kill(self) -> None:
        self._process.kill()


def _armed() -> Mapping[str, str]:
    return {name: os.environ[name] for name in (ENV, ENV_LOG) if name in os.environ}


def _named(place: str) -> Callable[[Cell], Topology]:
    """A module's function."""
    module, _, name = place.partition(":")
    found: Callable[[Cell], Topology] = getattr(importlib.import_module(module), name)
    return found


def main() -> None:
    fields = json.loads(sys.argv[1])
    cell = Cell(
        name=fields["name"],
        mode=None if fields["mode"] is None else SinkMode(fields["mode"]),
        guarantee=Guarantee(fields["guarantee"]),
        folder=Path(fields["folder"]),
        database=Database.from_url(fields["database"]),
        queue=fields["queue"],
        batch_messages=fields["batch_messages"],
        in_flight=fields["in_flight"],
        build=None if fields["build"] is None else _named(fields["build"]),
    )
    drive_and_exit(cell, "spark", _armed())


if __name__ == "__main__":
    main()
