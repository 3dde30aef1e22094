"""Writes docs/delta.md from the matrix of features in the code: `.venv/bin/python tools/delta_doc.py`."""

from __future__ import annotations

from pathlib import Path

from stormproof.sinks.delta.catalog import as_markdown as names_as_markdown
from stormproof.sinks.delta.features import as_markdown

PATH = Path(__file__).resolve().parents[1] / "docs" / "delta.md"
HEAD = """# Delta tables

Made by `tools/delta_doc.py` from `sinks/delta/features.py`: do not edit.

`DeltaSink(path)` makes a Delta table, or writes to one that is there. Modes, types, object stores, schema contracts and
upkeep: [sinks.md](sinks.md). The table's features decide who commits:

- **delta-rs** where it can: some 20 ms a commit, without a JVM.
- **delta-spark** otherwise: a second or two a commit.
- Nobody: a feature that neither would write without harm is **refused** by name.

`committer="delta-rs"` refuses what needs Spark; `committer="spark"` always commits by Spark. `stormproof explain` and
`stormproof status TOPOLOGY` show who commits, and why.

MATRIX
## Partitions and properties

`DeltaSink(path, partition_by=["day"], properties={"delta.appendOnly": "true"})` applies to a table that the sink makes;
an existing one keeps its own. `partition_by` is a column or a list of columns.

A partition value becomes part of a path. A message fails whose value is:

- empty, or `__HIVE_DEFAULT_PARTITION__`, which stand for NULL there;
- with a NUL, or of bytes that are not UTF-8;
- a decimal with a negative scale;
- too long: `name=value` has at most 255 bytes, where a byte of the value counts three times unless it is an ASCII
  letter, a digit, `.`, `_`, `~` or `-`. All partition columns together share the 4,096 bytes of a path, or the 1,024 of
  an object's key.

## Tables by name

`DeltaSink(CatalogTable("lake.orders"))` writes to a table that Spark's session catalog knows by name. At a start the
catalog gives the folder; from then on the sink is that of `DeltaSink(path)`. If the table was dropped and made again,
or the name leads to another table, the start is refused.

The first run makes a missing table, with `partition_by` and `properties`, in the folder of a managed table of that
name, and registers it as an external one: `DROP TABLE` leaves the folder.

NAMES
- The catalog is that of the engine's Spark, or with `engine="inline"` of one that is started. Spark's default catalog
  forgets its tables. For a lasting one, set for example `spark.sql.catalogImplementation = "hive"` in
  `stormproof.toml`, with `spark.hadoop.javax.jdo.option.ConnectionURL` or `hive-site.xml` for the metastore's database.

## Where Spark commits

- It is the engine's Spark, or with `engine="inline"` one that is started. A session that you started needs Delta's
  `spark.sql.extensions` and `spark.sql.catalog.spark_catalog`.
- **On a local disk let no other program write to such a table**: Spark can overwrite a log entry that another writer
  puts at the same instant. Topologies of one machine take turns by a lock, `_delta_log/.stormproof-commit`, which a
  killed driver's JVM still holds. In object stores Spark does not commit.
- A `DeltaMap` is written by delta-rs alone, and takes no partitioned table.
"""


LEAD = """## Features

Of a table with several features, one that is refused decides, then one that needs Spark. Where only upsert and fold are
refused, delta-rs appends.

"""


def text() -> str:
    """The page."""
    return HEAD.replace("MATRIX", f"{LEAD}{as_markdown()}").replace("NAMES", names_as_markdown())


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
