"""Writes docs/delta.md from the matrix of features in the code: `.venv/bin/python tools/delta_doc.py`."""

from __future__ import annotations

from pathlib import Path

from stormproof.sinks.delta.catalog import as_markdown as names_as_markdown
from stormproof.sinks.delta.features import as_markdown

PATH = Path(__file__).resolve().parents[1] / "docs" / "delta.md"
HEAD = """# Delta tables

Made by `tools/delta_doc.py` from `sinks/delta/features.py`: do not edit.

`DeltaSink(path)` writes to a table that it makes, or to one that is there already. The table's features decide who writes:

- **delta-rs**, wherever it can: it commits in some 20 ms, and needs no JVM. The log entry of an append is put there by
  Stormproof itself, under a name that must be free, where no feature, checkpoint or other writer asks for more: delta-rs
  lists the log's folder for each one. Such an entry says `"engineInfo": "stormproof"`.
- **delta-spark** otherwise: it writes every feature that the table below gives it, in a second or two a commit.
- A table that neither would write without harm is **refused** by the name of the feature, when the run starts and again in
  each commit. Nothing is written then.

`stormproof explain` and `stormproof status TOPOLOGY` say who commits, and which feature asks for Spark. Both
committers keep one kind of evidence: transaction identifier, txid, digest, rows and epoch stand in the table's log,
and `stormproof audit verify` reads them there. `DeltaSink(path, committer="delta-rs")` refuses what needs Spark;
`committer="spark"` has Spark write always.

## A table that is made

`DeltaSink(path, partition_by=["day"], properties={"delta.appendOnly": "true"})` makes a missing table so. A table
that is there keeps its own partitions and properties. `partition_by` is a column or a list of columns of the
stream. A value of a column by which the table is partitioned
becomes part of files' paths. So a message fails with one that is empty, or `__HIVE_DEFAULT_PARTITION__`, which stand for NULL
there; that has a NUL; of bytes, that is not UTF-8; a decimal with a scale that is below zero, which delta-rs cannot read; or that takes too long a name: `name=value` has 255 bytes at most, where
each byte of the value counts three times but letters, digits, `.`, `_`, `~` and `-` of ASCII. Several such columns share the
4,096 bytes of a path, and the 1,024 of an object's key.

## Tables by name

`DeltaSink(CatalogTable("lake.orders"))` writes to a table that the session catalog of the process's Spark knows by name.
When a run starts, the catalog says in which folder the table is; the sink then writes to that folder, with the guarantees,
claims and committers of `DeltaSink(path)`, and the catalog's readers see its commits, since they read the same log. The
ledger records folder and name: `stormproof audit`, `compact` and `vacuum` go by the folder, and ask no catalog. Of a table
that was dropped and made again, or of a name that leads to another table, the start is refused, as of another table in the
folder.

A table that is missing is made by the first run, with `partition_by` and `properties`, in the folder that a managed table
of that name would have, and registered as an external one: `DROP TABLE` leaves its folder there. The schema must be there.

NAMES
- The catalog is that of the engine's Spark, or with `engine="inline"` of one that is started for it. By default Spark's
  catalog is in memory and forgets its tables with the process. For one that lasts, set in `stormproof.toml`, for example,
  `spark.sql.catalogImplementation = "hive"`, with `spark.hadoop.javax.jdo.option.ConnectionURL` or `hive-site.xml` for the
  metastore's database.
- A table that is dropped while a driver writes to it is lost as a folder that is removed is.

## Where Spark commits

- It is the Spark of the process: that of the engine, or with `engine="inline"` one that is started when the sink is
  opened. A session that you started yourself needs Delta's two settings (`spark.sql.extensions`,
  `spark.sql.catalog.spark_catalog`).
- Rows of an append are prepared in the table's folder, as for delta-rs; Spark copies them, and they are removed.
- On a local disk Spark's log store can overwrite a log entry that another writer puts at the same instant. All
  topologies on the machine commit to such a table under one lock, the file `_delta_log/.stormproof-commit`, which
  Spark's JVM holds: it outlives a driver that is killed. Other programs do not know of the lock: do not let them
  write to a table on a local disk while Spark commits to it here.
- A state's map (`DeltaMap`) is written by delta-rs alone, and takes no partitioned table.

## Which table is written by whom

A table that has several features is refused where one of them is; otherwise one that needs delta-spark is enough.

"""


def text() -> str:
    """The page."""
    return HEAD.replace("NAMES", names_as_markdown()) + as_markdown()


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
