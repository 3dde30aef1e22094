"""Dagster and Airflow run `examples/orchestrators`: a task that dies is tried again, and the ledger goes on."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import venv
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Final

import pytest
from deltalake import DeltaTable
from support.brokers import LEFT_OUT, free_port, until
from support.queues import prepared_database
from support.shown import sql

from stormproof.core.postgres.database import Database

# Minutes: each installs hundreds of megabytes, and starts Spark twice. `--all`, `-k` and `::` run them.
pytestmark = [pytest.mark.postgres, pytest.mark.spark(own=True), pytest.mark.sampled(0.0), pytest.mark.timeout(1_800)]

REPOSITORY: Final = Path(__file__).parents[2]
EXAMPLES: Final = REPOSITORY / "examples" / "orchestrators"
ORDERS: Final = [*({"number": n, "cents": 100 * n} for n in range(1, 6)), {"number": 6, "cents": -1}]
TIMEOUT_S: Final = 600
DIES: Final = """
    if not os.path.exists("died"):
        open("died", "w").close()
        os.environ["STORMPROOF_FAILPOINT"] = "commit.after_sink=kill"
"""
"""What the topology does first: its process is killed once, between the commits of its two tables."""


def installed(requirement: str, folder: Path) -> Path:
    """The programs of an environment of its own, with this package beside what is asked for."""
    venv.EnvBuilder(with_pip=True).create(folder)
    install = [
        str(folder / "bin" / "python"),
        "-m",
        "pip",
        "install",
        "--quiet",
        requirement,
        "--editable",
        str(REPOSITORY),
    ]
    done = subprocess.run(install, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    if done.returncode != 0:
        pytest.skip(f"{LEFT_OUT}{requirement}: it does not install here: {done.stderr.strip().splitlines()[-1]}")
    return folder / "bin"


@pytest.fixture(scope="module")
def dagster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed("dagster==1.13.29", tmp_path_factory.mktemp("dagster"))


@pytest.fixture(scope="module")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed("apache-airflow==3.3.2", tmp_path_factory.mktemp("airflow"))


@pytest.fixture
def known(database: Database, tmp_path: Path) -> Mapping[str, str]:
    """The environment of a deployment whose queue has orders."""
    prepared = prepared_database(database)
    (tmp_path / "orders.jsonl").write_text("\n".join(map(_json, ORDERS)))
    environment = {
        **os.environ,
        "STORMPROOF_DATABASE_URL": prepared.sqlalchemy_url.render_as_string(hide_password=False),
        "STORMPROOF_MASTER": "local[2]",
        "STORMPROOF_HOME": str(tmp_path / ".stormproof"),
        "LAKE": str(tmp_path / "lake"),
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }
    put = [sys.executable, "-m", "stormproof", "queue", "put", "orders", "--lines", "orders.jsonl"]
    subprocess.run(put, env=environment, check=True, timeout=60)
    return environment


def _json(order: Mapping[str, int]) -> str:
    return str(dict(order)).replace("'", '"')


def deploy(example: str, folder: Path) -> None:
    """Put an example and its topology there, which dies once, and is tried again after a second."""
    folder.mkdir(exist_ok=True)
    topology = (EXAMPLES / "orders.py").read_text()
    dying = topology.replace('    t = Topology("orders")\n', f'{DIES}    t = Topology("orders")\n')
    assert dying != topology
    (folder / "orders.py").write_text(dying.replace('"died"', repr(str(folder / "died"))))
    text = (EXAMPLES / example).read_text()
    (folder / example).write_text(text.replace("delay=30", "delay=1").replace("seconds=30", "seconds=1"))


def require_applied_once(folder: Path, database: Database, known: Mapping[str, str]) -> None:
    """Five orders are in both tables, one is a dead letter, and the process did die."""
    assert [path.name for path in folder.rglob("died")] == ["died"]
    rows = DeltaTable(str(folder / "lake" / "orders")).to_pyarrow_table().to_pylist()
    assert sorted(row["number"] for row in rows) == [1, 2, 3, 4, 5]
    assert sql(database, "select number, euros from orders order by number") == [(n, float(n)) for n in range(1, 6)]
    assert sql(database, "select count(*) from stormproof.dead_letter") == [(1,)]
    assert sql(database, "select count(*) > 0 from stormproof.txn where state = 'committed'") == [(True,)]
    verify = [sys.executable, "-m", "stormproof", "audit", "verify", "orders"]
    assert subprocess.run(verify, env=known, cwd=folder, timeout=60, check=False).returncode == 0


def test_an_asset_of_dagster_goes_on_after_its_process_was_killed(
    dagster: Path, known: Mapping[str, str], database: Database, tmp_path: Path
) -> None:
    deploy("dagster_orders.py", tmp_path)
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "dagster.yaml").touch()
    environment = {**known, "DAGSTER_HOME": str(tmp_path / "home"), "PYTHONPATH": str(tmp_path)}
    asset = [str(dagster / "dagster"), "asset", "materialize", "--select", "orders", "-f", "dagster_orders.py"]
    for is_first in (True, False):
        done = subprocess.run(
            asset, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
        assert (done.returncode, "SIGKILL" in done.stderr) == (0, is_first), done.stderr[-4000:]
    require_applied_once(tmp_path, database, known)


@contextmanager
def standing_alone(airflow: Path, folder: Path, environment: Mapping[str, str]) -> Generator[None]:
    """Airflow's scheduler, server and processor of DAGs; all of its processes end with the block."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [str(airflow / "airflow"), "standalone"], env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGINT)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def states(folder: Path) -> set[str]:
    """Of the tasks, by Airflow's own record."""
    if not (folder / "airflow.db").exists():
        return set()
    with closing(sqlite3.connect(f"file:{folder / 'airflow.db'}?mode=ro", uri=True)) as record:
        try:
            return {state for (state,) in record.execute("select state from task_instance")}
        except sqlite3.OperationalError:  # it makes its tables, or writes
            return set()


def test_a_task_of_airflow_is_tried_again_and_the_ledger_goes_on(
    airflow: Path, known: Mapping[str, str], database: Database, tmp_path: Path
) -> None:
    deploy("airflow_orders.py", tmp_path / "dags")
    port = free_port()
    environment = {
        **known,
        "PATH": f"{airflow}:{os.environ['PATH']}",
        "AIRFLOW_HOME": str(tmp_path),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{port}/execution/",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
    }
    assert shutil.which("airflow", path=str(airflow)) is not None
    with standing_alone(airflow, tmp_path, environment):
        until(lambda: states(tmp_path) & {"success", "failed"}, "the task did not end", TIMEOUT_S)
        assert states(tmp_path) == {"success"}
    require_applied_once(tmp_path, database, known)
