"""docs/stream_operations.md, "What a function gets and gives": each case of its table runs."""

from __future__ import annotations

import math
import re
from datetime import date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from support.jobs import Ran, run_job, source

from stormproof.core.engine.inline import InlineEngine
from stormproof.core.engine.protocol import Engine
from stormproof.sinks.stores.memory import MemorySink
from stormproof.trident.topology.stream import Topology

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PAGE = (Path(__file__).parents[2] / "docs" / "stream_operations.md").read_text()
TABLE = PAGE.partition("<!-- values of functions -->\n")[2].partition("\n\n")[0].splitlines()[2:]
ROWS = [[re.findall(r"`([^`]*)`", cell) for cell in line.strip("|").split("|")] for line in TABLE]
ROW = pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][0])
UTC = timezone.utc  # noqa: UP017 - as the page names it


def evaluated(text: str) -> Any:
    names = {"date": date, "datetime": datetime, "Decimal": Decimal, "UUID": UUID, "np": np, "pd": pd, "math": math}
    zones = {"UTC": UTC, "zone": lambda hours: timezone(timedelta(hours=hours))}
    return eval(text, {**names, **zones})  # noqa: S307 - our own page


def shown(line: str, value: object) -> tuple[str, str]:
    text = repr(value).replace("datetime.date", "date")  # of a datetime, too
    text = text.replace("zoneinfo.ZoneInfo(key='UTC')", "UTC")
    return line, text.replace("datetime.timezone.utc", "UTC")


def of_type(rows: pa.RecordBatch) -> tuple[pa.RecordBatch, range]:
    kinds = pa.repeat(str(rows.schema.field("c").type), rows.num_rows)
    return pa.RecordBatch.from_arrays([kinds], names=["kind"]), range(rows.num_rows)


def given(engine: Engine, row: list[list[str]], folder: Path) -> Ran:
    ((kind,), _, good, _, bad) = row
    topology = Topology("values")
    made = topology.stream("lines", source()).each(evaluated, "line", schema=f"c {kind}")
    made.map(shown, "line", "c", schema="line string, shown string").into(MemorySink("out", staging=folder))
    made.arrow(of_type, "c", schema="kind string").into(MemorySink("kinds", staging=folder))
    return run_job(engine, topology, [text.encode() for text in [*good, *bad, "None"]], folder)


def require_as_the_page_says(ran: Ran, row: list[list[str]]) -> None:
    _, kinds, good, wanted, bad = row
    got = {str(one["line"]): one["shown"] for one in ran.rows["out"]}
    assert got == {**dict(zip(good, wanted, strict=True)), "None": "None"}
    assert len(ran.report.failures) == len(bad)
    assert {one["kind"] for one in ran.rows["kinds"]} == {*kinds}


@ROW
def test_a_value_reaches_the_next_function_as_the_page_says(tmp_path: Path, row: list[list[str]]) -> None:
    require_as_the_page_says(given(InlineEngine(1), row, tmp_path), row)


@pytest.mark.parametrize("row", [ROWS[5], ROWS[7], ROWS[11]], ids=lambda row: row[0][0])
def test_on_spark_it_is_the_same(spark: SparkSession, tmp_path: Path, row: list[list[str]]) -> None:
    from stormproof.core.engine.spark import SparkEngine

    require_as_the_page_says(given(SparkEngine(spark, 2), row, tmp_path), row)
