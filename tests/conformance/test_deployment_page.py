"""docs/deployment.md: the check for monitoring says what is wrong, and the unit file is one."""

from __future__ import annotations

import configparser
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from stormproof.core.postgres.database import Database

PAGE = (Path(__file__).parents[2] / "docs" / "deployment.md").read_text()
TOPOLOGY = """
from stormproof import PostgresQueue, PostgresSink, Topology
queue = PostgresQueue("orders", schema="id bigint", max_attempts=1)
topology = Topology("orders")
topology.stream("orders", queue).into(PostgresSink("orders"))
queue.put([b'{"id": 1}'])
topology.run(engine="inline", until_idle=True)
queue.put([b"no json"])
"""
AGAIN = TOPOLOGY.replace("queue.put([b'{\"id\": 1}'])\n", "").replace('queue.put([b"no json"])\n', "")


@pytest.mark.postgres
def test_the_check_tells_health_from_dead_letters(database: Database, tmp_path: Path) -> None:
    url = database.sqlalchemy_url.render_as_string(hide_password=False)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "STORMPROOF_DATABASE_URL": url}

    def python(*command: str) -> subprocess.CompletedProcess[str]:
        whole = [sys.executable, *command]
        return subprocess.run(
            whole, cwd=tmp_path, env=environment, check=False, capture_output=True, text=True, timeout=60
        )

    (check,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert python("-m", "stormproof", "ledger", "migrate").returncode == 0
    assert python("-c", TOPOLOGY).returncode == 0
    healthy = python("-c", check)
    assert (healthy.returncode, healthy.stdout) == (0, "all is well\n"), healthy.stderr
    assert python("-c", AGAIN).returncode == 0
    ill = python("-c", check)
    assert (ill.returncode, ill.stdout) == (1, "orders: 1 dead letters\n")


def test_the_unit_file_has_the_exit_statuses_that_the_page_explains() -> None:
    unit = configparser.ConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read_string(re.findall(r"```ini\n(.*?)```", PAGE, re.DOTALL)[0])
    service = unit["Service"]
    assert (service["SuccessExitStatus"], service["RestartPreventExitStatus"]) == ("130", "2 3")
    assert service["ExecStart"].endswith("stormproof run orders.py:orders")
