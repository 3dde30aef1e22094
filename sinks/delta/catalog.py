"""Tables by name: where the catalog of the process's Spark says that a Delta table is.

A name only leads to a folder. Of such a table the log in its folder is the truth, for the catalog as for everybody else, so
it is claimed, read and written by its path. A catalog that takes the commits of its tables itself is another matter: it is
refused by name, and so are its tables.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from stormproof.core.arguments import shown
from stormproof.core.engine.spark_error import what_happened
from stormproof.core.errors import SinkRefused, StoreUnavailable, UsageError
from stormproof.sinks.delta.folds import spark_quoted
from stormproof.sinks.delta.spark import spark_of_process
from stormproof.sinks.protocol import SinkProblem

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SESSION_CATALOG: Final = "spark_catalog"
DELTA_CATALOG: Final = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
"""The class of the session's catalog that leads to tables by path, and leaves their commits to their logs."""

PLACES: Final = (
    ("managed table of the session catalog", "by its folder", ""),
    ("external table of the session catalog", "by its folder", ""),
    ("table that is missing", "refused", "make it with `CREATE TABLE ... USING delta`"),
    ("view", "refused", "name the table below it"),
    ("table of another format", "refused", "name a table that was made with USING delta"),
    (
        "table with managed or catalog commits",
        "refused",
        "its catalog takes the commits; a log entry beside them would be lost, or lose theirs",
    ),
    (
        "session catalog of another class than `DeltaCatalog`",
        "refused",
        "it may take the commits of its tables itself, as Unity Catalog's does",
    ),
    ("name in another catalog (`unity.lake.orders`)", "refused", "the same"),
    ("name that stands for a path (delta.`/lake/orders`)", "refused", "give `DeltaSink` the path"),
)
"""What a name may lead to, who writes there, and why nobody does. The table in docs/delta.md is made from it."""

_PART: Final = re.compile(r"`((?:[^`]|``)+)`|(\w+)")
_PATHS: Final = ("delta", "parquet")
"""What stands in a schema's place where SQL names a table by its path."""

_MISSING: Final = ("TABLE_OR_VIEW_NOT_FOUND", "SCHEMA_NOT_FOUND")


@dataclass(frozen=True, slots=True, init=False)
class CatalogTable:
    """A Delta table by its name in Spark's session catalog: ``DeltaSink(CatalogTable("lake.orders"))``.

    The name is ``SCHEMA.TABLE`` or ``spark_catalog.SCHEMA.TABLE``; a part with other characters than letters, digits and
    underscores stands in backquotes, as in SQL. Upper and lower case are one, as in Spark.

    When a run starts, the catalog of the process's Spark says in which folder the table is, and from then on the sink writes
    to that folder: guarantees, claims and committers are those of ``DeltaSink(path)``. Spark is that of the engine, or is
    started for it, which takes 5 to 25 seconds. The table must be there.

    Raises:
        UsageError: no such name, or one of another catalog. Those may take the commits of their tables themselves, as Unity
            Catalog does; they are not served.
    """

    schema: str
    table: str

    def __init__(self, name: str) -> None:
        parts = _parts(name)
        where = f"CatalogTable({shown(name)})"
        if parts is None or len(parts) not in (2, 3):
            raise UsageError(
                f"{where}: a table is named as 'SCHEMA.TABLE'; parts with other characters than letters, digits and _ stand "
                "in backquotes, as `my table`"
            )
        if len(parts) == 3 and parts[0] != SESSION_CATALOG:
            raise UsageError(
                f"{where}: the name is of catalog {parts[0]!r}, and only Spark's session catalog, {SESSION_CATALOG!r}, is "
                "served: another one may take the commits of its tables itself, as Unity Catalog does. Register the table "
                f"in {SESSION_CATALOG!r} with CREATE TABLE ... USING delta LOCATION ..., or name its folder: DeltaSink(path)"
            )
        if parts[-2] in _PATHS:
            raise UsageError(f"{where}: the name stands for a path; give DeltaSink the path itself")
        object.__setattr__(self, "schema", parts[-2])
        object.__setattr__(self, "table", parts[-1])

    def __str__(self) -> str:
        return ".".join([SESSION_CATALOG, *(_shown(part) for part in (self.schema, self.table))])

    def folder(self, where: str) -> str:
        """Where the catalog says that the table is now: a path, or the URL of a folder in an object store.

        Nothing of the table itself is read, so that a log that a power loss tore can be found and repaired.

        Raises:
            SettingsError: Spark does not start.
            SinkRefused: there is no such table, it is no Delta table, or the catalog's tables are not written by path.
            StoreUnavailable: the catalog does not answer.
        """
        session = spark_of_process(where, "its name is looked up in Spark's catalog")
        where = f"{where}: table {self}"
        kind = str(session.conf.get(f"spark.sql.catalog.{SESSION_CATALOG}", "Spark's own"))
        if kind != DELTA_CATALOG:
            raise SinkRefused(
                f"{where}: the session's catalog is {kind}, which may take the commits of its tables itself; only "
                f"spark.sql.catalog.{SESSION_CATALOG}={DELTA_CATALOG} is served. Use that one, or name the table's folder: "
                "DeltaSink(path)"
            )
        found = self._entry(session, where)
        view = str(found.tableType().name()) == "VIEW"
        made: Any = found.provider()
        provider = str(made.get()).lower() if made.isDefined() else "no provider"
        if view or provider != "delta":
            what = "a view" if view else f"a table of {provider}"
            raise SinkRefused(f"{where} is {what}, and no Delta table; name a table that was made with USING delta")
        return _as_path(str(found.location().toString()))

    def _entry(self, session: SparkSession, where: str) -> Any:
        """The catalog's entry, an `org.apache.spark.sql.catalyst.catalog.CatalogTable`."""
        from py4j.protocol import Py4JError
        from pyspark.errors import AnalysisException
        from pyspark.errors.exceptions.base import PySparkException

        java: Any = session._jsparkSession  # pyright: ignore[reportPrivateUsage] - no public way
        try:
            state = java.sessionState()
            name = state.sqlParser().parseTableIdentifier(f"{spark_quoted(self.schema)}.{spark_quoted(self.table)}")
            return state.catalog().getTableMetadata(name)
        except AnalysisException as error:
            if error.getCondition() in _MISSING:
                forgets = session.conf.get("spark.sql.catalogImplementation", "in-memory") == "in-memory"
                hint = (
                    ". This Spark's catalog is in memory and begins empty; for one that lasts set "
                    "spark.sql.catalogImplementation=hive"
                )
                raise SinkRefused(
                    f"{where} is not there: make it with CREATE TABLE ... USING delta{hint if forgets else ''}",
                    problem=SinkProblem.TABLE_GONE,
                ) from error
            raise StoreUnavailable(f"{where}: the catalog does not answer: {what_happened(str(error))}") from error
        except (PySparkException, Py4JError) as error:
            raise StoreUnavailable(f"{where}: the catalog does not answer: {what_happened(str(error))}") from error


def _parts(name: object) -> list[str] | None:
    """The parts of a name as Spark compares them, in lower case; None: it is none."""
    if not isinstance(name, str):
        return None
    parts, at = list[str](), 0
    while True:
        found = _PART.match(name, at)
        if found is None:
            return None
        parts.append((found[2] or found[1].replace("``", "`")).lower())
        at = found.end()
        if at == len(name):
            return parts
        if name[at] != ".":
            return None
        at += 1


def _shown(part: str) -> str:
    return part if re.fullmatch(r"\w+", part) else spark_quoted(part)


def _as_path(location: str) -> str:
    """A location of the catalog, which is a URI, as an address of ours."""
    scheme = urlsplit(location).scheme
    return unquote(urlsplit(location).path) if scheme in ("", "file") else unquote(location)


def as_markdown() -> str:
    """`PLACES` as a table, for the docs."""
    lines = ["| what the name leads to | written | |", "| --- | --- | --- |"]
    lines += [f"| {what} | {how} | {why} |" for what, how, why in PLACES]
    return "\n".join(lines) + "\n"
