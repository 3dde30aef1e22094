"""A driver on Spark, as a process of its own: a Spark session cannot be forked.

``python spark_driver.py CELL`` with the cell as JSON; failpoints come by the environment.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

from stormproof.core.failpoint import ENV, ENV_LOG
from stormproof.core.guarantee import Guarantee
from stormproof.core.postgres.database import Database
from support.crashes import Cell, drive
from support.topologies import SinkMode

TIMEOUT_S = 240


def run_spark_driver(cell: Cell, armed: str = "", log: Path | None = None) -> int:
    """Run one driver on Spark to its end; 0, or the negative number of the signal that killed it."""
    fields = {
        **asdict(cell),
        "folder": str(cell.folder),
        "database": cell.database.sqlalchemy_url.render_as_string(hide_password=False),
    }
    environment: dict[str, str] = {**os.environ, ENV: armed, "PYTHONPATH": str(Path(__file__).parents[1])}
    if log is not None:
        environment[ENV_LOG] = str(log)
    command = [sys.executable, __file__, json.dumps(fields)]
    # In a process group of its own: Spark's JVM follows its driver within seconds of the driver's death.
    return subprocess.run(command, env=environment, timeout=TIMEOUT_S, start_new_session=True, check=False).returncode


def _armed() -> Mapping[str, str]:
    return {name: os.environ[name] for name in (ENV, ENV_LOG) if name in os.environ}


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
    )
    drive(cell, "spark", dict(_armed()))


if __name__ == "__main__":
    main()
