"""The README's own topology runs when it is pasted."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from deltalake import DeltaTable

from stormproof.core.postgres.database import Database

README = Path(__file__).parents[2] / "README.md"
LINES_MAX = 25

pytestmark = pytest.mark.postgres


def run_block(number: int, database: Database, folder: Path) -> str:
    """What the README's code prints when it is saved to a file and run there."""
    text = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)[number]
    assert len(text.splitlines()) <= LINES_MAX
    assert text.count("until_idle=True") == 1
    path = folder / "mine.py"
    path.write_text(text.replace("until_idle=True", 'until_idle=True, engine="inline"'))  # Spark takes seconds to start
    url = database.sqlalchemy_url.render_as_string(hide_password=False)
    environment = {**os.environ, "STORMPROOF_DATABASE_URL": url}
    migrate = [sys.executable, "-m", "stormproof", "ledger", "migrate"]
    subprocess.run(migrate, env=environment, cwd=folder, check=True, capture_output=True, timeout=60)
    done = subprocess.run(
        [sys.executable, str(path)],
        env=environment,
        cwd=folder,
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout


def test_the_readmes_topology_runs_when_pasted(database: Database, tmp_path: Path) -> None:
    assert run_block(0, database, tmp_path) == "3 messages in 2 batches, 1 dead letter\n"
    should = [("Lima", 1, 19), ("Oslo", 2, 8)]
    delta = DeltaTable(str(tmp_path / "lake" / "weather")).to_pyarrow_table().to_pylist()
    assert sorted((row["city"], row["n"], row["total"]) for row in delta) == should
    with psycopg.connect(database.conninfo) as connection:
        assert connection.execute("select city, n, total from weather order by city").fetchall() == should


def test_the_readmes_bolt_runs_when_pasted(database: Database, tmp_path: Path) -> None:
    said = "2 messages, failures by reason: {'failed': 2}, 1 dead letter\n"
    assert run_block(1, database, tmp_path) == said
    with psycopg.connect(database.conninfo) as connection:
        words = [word for (word,) in connection.execute("select word from words order by word")]
    assert words == ["cow", "moon", "the", "the"]


def test_a_first_put_from_python_finds_its_tables(tmp_path: Path) -> None:
    code = 'from stormproof import PostgresQueue; print(PostgresQueue("first").put([b"a", b""]).messages)'
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "2\n"
