"""docs/sinks.md: each row of its tables, and its code."""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from deltalake import DeltaTable
from support.sink_harness import APPEND, FOLD, SinkHarness

from stormproof import DeltaSink, PostgresSink
from stormproof.core.errors import SinkRefused, TopologyError
from stormproof.core.guarantee import Guarantee
from stormproof.core.postgres.database import Database
from stormproof.core.schema import KNOWN_TYPES, parse_schema
from stormproof.core.sink import SinkInput
from stormproof.sinks.protocol import SinkIdentity

PAGE = (Path(__file__).parents[2] / "docs" / "sinks.md").read_text()
IDENTITY = SinkIdentity("topology", "inc-1", "t")

pytestmark = pytest.mark.postgres


def rows(table: str) -> list[list[str]]:
    """The cells of the page's table below this comment, without its head."""
    lines = PAGE.partition(f"<!-- {table} -->\n")[2].partition("\n\n")[0].splitlines()
    assert len(lines) > 3, table
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def input_of(kind: str) -> SinkInput:
    return SinkInput(parse_schema(f"c {kind}"))


def verdict(sink: DeltaSink | PostgresSink, identity: SinkIdentity, input_: SinkInput) -> str:
    try:
        sink.open(identity, input_, 1).close()
    except SinkRefused:
        return "refused"
    return "taken"


@pytest.mark.parametrize("row", rows("types"), ids=lambda row: row[0])
def test_a_type_becomes_what_the_page_says(row: list[str], database: Database, tmp_path: Path) -> None:
    kinds, delta, postgres = row
    for kind in names(kinds):
        lake = tmp_path / kind
        DeltaSink(lake).open(IDENTITY, input_of(kind), 1).close()
        made = DeltaTable(lake).schema().fields[0].type
        assert str(getattr(made, "type", made)) == delta
        sink = PostgresSink(f"t_{len(kind)}", database=database, staging=tmp_path)
        if postgres == "refused":
            with pytest.raises(TopologyError, match="'c'"):
                sink.check(input_of(kind), Guarantee.EXACTLY_ONCE)
            continue
        sink.open(SinkIdentity("topology", "inc-1", kind), input_of(kind), 1).close()
        with psycopg.connect(database.conninfo) as connection:
            found = connection.execute(
                "select format_type(atttypid, atttypmod) from pg_attribute where attrelid = %s::regclass and attnum = 1",
                (sink.table,),
            ).fetchone()
        assert found == (postgres,)


def test_every_type_that_a_schema_knows_is_on_the_page() -> None:
    told = {re.sub(r"\W.*", "", kind) for row in rows("types") for kind in names(row[0])}
    assert set(re.findall(r"[a-z_]{3,}", KNOWN_TYPES)) == told


@pytest.mark.parametrize("row", rows("postgres columns"), ids=lambda row: row[0])
def test_a_column_takes_what_the_page_says(row: list[str], database: Database, tmp_path: Path) -> None:
    (kind,) = names(row[0])
    listed = re.sub(r"\[[^\]]*\]\(#[^)]*\)", "", row[1])
    should = {**dict.fromkeys(names(listed), "taken"), **dict.fromkeys(names(row[2]), "refused")}
    found: dict[str, str] = {}
    for number, column in enumerate(should):
        with psycopg.connect(database.conninfo, autocommit=True) as connection:
            connection.execute(f"create table t{number} (c {column})".encode())
        sink = PostgresSink(f"t{number}", database=database, staging=tmp_path)
        identity = SinkIdentity("topology", "inc-1", f"t{number}")
        found[column] = verdict(sink, identity, input_of(kind))
    assert found == should


@pytest.mark.parametrize("row", rows("postgres tables"), ids=lambda row: row[0])
def test_a_postgres_table_is_taken_or_refused(row: list[str], database: Database, tmp_path: Path) -> None:
    (statement,) = names(row[0])
    with psycopg.connect(database.conninfo, autocommit=True) as connection:
        connection.execute(statement.encode())
    for input_, should in ((APPEND, row[1]), (FOLD, row[2])):
        sink = PostgresSink("t", database=database, staging=tmp_path)
        assert verdict(sink, IDENTITY, input_) == should


def test_a_column_with_a_default_is_filled_and_a_further_one_is_null(database: Database, tmp_path: Path) -> None:
    harness = SinkHarness("postgres-append", tmp_path, database)
    harness.sql("create table counts (more int, at date not null default '2026-01-02', n bigint, word text)")
    with closing(harness.open()) as session:
        session.commit(harness.prepare(session, 1, None, {"a": 1}), checked=True)
    with psycopg.connect(database.conninfo) as connection:
        assert connection.execute("select word, n, more, at::text from counts").fetchall() == [
            ("a", 1, None, "2026-01-02")
        ]


def test_the_upsert_keeps_the_newest_row_of_a_key(database: Database, tmp_path: Path) -> None:
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "run(" in block]
    (tmp_path / "upsert.py").write_text(code)
    url = database.sqlalchemy_url.render_as_string(hide_password=False)
    for command in (["-m", "stormproof", "ledger", "migrate"], ["upsert.py"]):
        subprocess.run(
            [sys.executable, *command],
            cwd=tmp_path,
            env={"STORMPROOF_DATABASE_URL": url},
            check=True,
            capture_output=True,
            timeout=60,
        )
    with psycopg.connect(database.conninfo) as connection:
        statuses = connection.execute("select order_id, status from order_status order by 1").fetchall()
    assert statuses == [(1, "shipped"), (2, "cancelled")]


def test_the_suite_for_a_sink_of_ones_own_runs_as_the_page_has_it(tmp_path: Path) -> None:
    (code,) = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "SinkConformance" in block]
    (tmp_path / "test_page.py").write_text(code)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "test_page.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2] / "examples")},
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stdout[-2000:]
    assert re.search(r"2\d passed", done.stdout)
