"""Delta tables with one feature each, as Spark makes them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from deltalake import DeltaTable, Schema

from support.sink_harness import SCHEMA

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

PLAIN: Final = "word STRING, n BIGINT"
UTC_VALUES: Final = "spark.databricks.delta.write.utcTimestampPartitionValues"


@dataclass(frozen=True)
class Made:
    """How Spark makes a table: columns, what follows them, its properties, and statements after it."""

    columns: str = PLAIN
    clause: str = ""
    properties: str = ""
    then: tuple[str, ...] = ()
    """`{table}` is the table, and `{other}` one beside it."""

    def make(self, session: SparkSession, path: Path) -> None:
        properties = f"TBLPROPERTIES ({self.properties})" if self.properties else ""
        session.sql(f"CREATE TABLE delta.`{path}` ({self.columns}) USING delta {self.clause} {properties}")
        for statement in self.then:
            session.sql(statement.format(table=f"delta.`{path}`", other=f"delta.`{path}-other`"))


BY_SPARK: Final[Mapping[str, Made]] = {
    "no further feature": Made(),
    "partitions": Made(clause="PARTITIONED BY (word)"),
    "partitions by a float, a decimal or binary": Made(f"{PLAIN}, at DOUBLE", "PARTITIONED BY (at)"),
    "file paths that delta-rs spells otherwise": Made(
        f"{PLAIN}, city STRING", "PARTITIONED BY (city)", then=("INSERT INTO {table} VALUES ('old', 1, 'Zürich')",)
    ),
    "files outside of its folder": Made(
        then=(
            "CREATE TABLE {other} USING delta AS SELECT 'old' AS word, 1L AS n",
            "CREATE OR REPLACE TABLE {table} SHALLOW CLONE {other}",
        ),
    ),
    "partitions by a timestamp": Made(f"{PLAIN}, at TIMESTAMP", "PARTITIONED BY (at)"),
    "partition timestamps without a zone": Made(
        f"{PLAIN}, at TIMESTAMP",
        "PARTITIONED BY (at)",
        then=(
            f"SET {UTC_VALUES}=false",
            "INSERT INTO {table} VALUES ('old', 1, TIMESTAMP '2024-01-01 10:00:00')",
            f"RESET {UTC_VALUES}",
        ),
    ),
    "varchar(n)": Made("word VARCHAR(3), n BIGINT"),
    "char(n), also nested in a column; nested varchar(n)": Made("word CHAR(3), n BIGINT"),
    "column names that delta-rs uses itself": Made(f"{PLAIN}, __delta_rs_source STRING"),
    "liquid clustering": Made(clause="CLUSTER BY (word)"),
    "deletion vectors": Made(properties="'delta.enableDeletionVectors' = 'true'"),
    "column mapping": Made(properties="'delta.columnMapping.mode' = 'name'"),
    "NOT NULL": Made("word STRING NOT NULL, n BIGINT"),
    "CHECK constraints": Made(then=("ALTER TABLE {table} ADD CONSTRAINT few CHECK (n < 1000)",)),
    "generated columns": Made(f"{PLAIN}, twice BIGINT GENERATED ALWAYS AS (n * 2)"),
    "identity columns": Made(f"{PLAIN}, id BIGINT GENERATED ALWAYS AS IDENTITY"),
    "column defaults": Made(
        f"{PLAIN}, level STRING DEFAULT 'low'", "", "'delta.feature.allowColumnDefaults' = 'supported'"
    ),
    "row tracking": Made(properties="'delta.enableRowTracking' = 'true'"),
    "domain metadata": Made(properties="'delta.feature.domainMetadata' = 'supported'"),
    "change data feed": Made(properties="'delta.enableChangeDataFeed' = 'true'"),
    "delta.appendOnly": Made(properties="'delta.appendOnly' = 'true'"),
    "type widening": Made(
        f"{PLAIN}, small INT",
        properties="'delta.enableTypeWidening' = 'true'",
        then=("INSERT INTO {table} VALUES ('old', 1, 2)", "ALTER TABLE {table} ALTER COLUMN small TYPE BIGINT"),
    ),
    "variant columns": Made(f"{PLAIN}, v VARIANT", then=("INSERT INTO {table} SELECT 'old', 1, parse_json('[1]')",)),
    "timestamps without zone": Made(f"{PLAIN}, at TIMESTAMP_NTZ"),
    "v2 checkpoints": Made(properties="'delta.checkpointPolicy' = 'v2', 'delta.checkpointInterval' = '2'"),
    "in-commit timestamps": Made(properties="'delta.enableInCommitTimestamps' = 'true'"),
    "VACUUM's protocol check": Made(properties="'delta.feature.vacuumProtocolCheck' = 'supported'"),
    "checkpoint protection": Made(properties="'delta.feature.checkpointProtection' = 'supported'"),
    "materialized partition columns": Made(
        clause="PARTITIONED BY (word)", properties="'delta.feature.materializePartitionColumns' = 'supported'"
    ),
    "Iceberg compatibility": Made(
        properties="'delta.columnMapping.mode' = 'name', 'delta.enableIcebergCompatV2' = 'true'"
    ),
    "UniForm": Made(
        properties="'delta.columnMapping.mode' = 'name', 'delta.enableIcebergCompatV2' = 'true', "
        "'delta.universalFormat.enabledFormats' = 'iceberg'"
    ),
    "delta.setTransactionRetentionDuration": Made(
        properties="'delta.setTransactionRetentionDuration' = 'interval 7 days'"
    ),
}
"""By the name of its row in the matrix."""

BY_HAND: Final[Mapping[str, Mapping[str, Any]]] = {
    "column invariants": {"column": {"delta.invariants": '{"expression": {"expression": "n > 0"}}'}},
    "managed or catalog commits": {"both": "catalogManaged"},
    "partition columns whose names no path takes": {"partition": "of\tday"},
    "collations": {"writer": "collations-preview"},
    "geometry and geography": {"both": "geospatial"},
    "redirection": {"writer": "redirectWriterOnly-preview"},
    "a protocol newer than reader 3, writer 7": {"version": 8},
    "any other feature": {"writer": "featureOfTheFuture"},
}
"""Those that Spark makes only in a catalog, or not in this release: the first log entry is written by hand."""


def make_by_hand(path: Path, what: Mapping[str, Any]) -> None:
    """Make a table whose first log entry says so."""
    by = [what["partition"]] if "partition" in what else []
    DeltaTable.create(
        path, Schema.from_arrow(pa.schema([*SCHEMA, *(pa.field(name, pa.string()) for name in by)])), partition_by=by
    )
    entry = path / "_delta_log" / f"{0:020}.json"
    actions = [json.loads(line) for line in entry.read_text().splitlines()]
    for action in actions:
        if "protocol" in action and "version" in what:
            action["protocol"]["minWriterVersion"] = what["version"]
        elif "protocol" in action and "writer" in what:
            action["protocol"] = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": [what["writer"]]}
        elif "protocol" in action and "both" in what:
            both = [what["both"]]
            action["protocol"] = {
                "minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": both, "writerFeatures": both
            }  # fmt: skip
        elif "metaData" in action and "settings" in what:
            action["metaData"]["configuration"] = what["settings"]
        elif "metaData" in action and "column" in what:
            schema = json.loads(action["metaData"]["schemaString"])
            schema["fields"][1]["metadata"] = what["column"]
            action["metaData"]["schemaString"] = json.dumps(schema)
    entry.write_text("".join(json.dumps(action) + "\n" for action in actions))
