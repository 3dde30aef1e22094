"""Tables by name: where the catalog of the process's Spark says that a Delta table is.

A name only leads to a folder. Of such a table the log in its folder is the truth, for the catalog as for everybody else, so
it is made, claimed, read and written by its path. A catalog that takes the commits of its tables itself is another matter:
it is refused by name, and so are its tables.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from stormproof.core.base.arguments import shown
from stormproof.core.base.errors import SinkRefused, StoreUnavailable, UsageError
from stormproof.core.engine.spark_error import condition_of, what_happened
from stormproof.core.storage.files import files_at
from stormproof.sinks.contract.protocol import SinkIdentity, SinkProblem
from stormproof.sinks.delta.log import DeltaLog
from stormproof.sinks.delta.opening import is_claimed_by
from stormproof.sinks.delta.spark import spark_literal, spark_of_process
from stormproof.sinks.delta.versions import is_table, load_table
from stormproof.sinks.rows.merge_sql import spark_quoted

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SESSION_CATALOG: Final = "spark_catalog"
DELTA_CATALOG: Final = "org.apache.spark.sql.delta.catalog.DeltaCatalog"
"""The class of the session's catalog that leads to tables by path, and leaves their commits to their logs."""

PLACES: Final = (
    ("managed or external table of the session catalog", "by its folder", ""),
    ("missing table", "made by the first run", "as an external one"),
    ("missing table, the catalog is in memory", "refused", "the next process would not find it"),
    ("missing table, its folder has files", "refused", "register a table there by hand"),
    ("table that was dropped since", "refused", "the error has the statement that registers it again"),
    ("missing schema", "refused", "make it with `CREATE SCHEMA`"),
    ("view", "refused", "name the table below it"),
    ("table of another format", "refused", "name a table that was made with USING delta"),
    ("table with managed or catalog commits", "refused", "its catalog takes the commits"),
    (
        "session catalog of another class than `DeltaCatalog`",
        "refused",
        "it may take the commits, as Unity Catalog's does",
    ),
    ("name in another catalog (`unity.lake.orders`)", "refused", "the same"),
    ("name that stands for a path (delta.`/lake/orders`)", "refused", "give `DeltaSink` the path"),
)
"""What a name may lead to, who writes there, and why nobody does. The table in docs/delta.md is made from it."""

_PART: Final = re.compile(r"`((?:[^`]|``)+)`|(\w+)")
_PATHS: Final = ("delta", "parquet")
"""What stands in a schema's place where SQL names a table by its path."""


@dataclass(frozen=True, slots=True)
class TableLocation:
    """The folder of a table: a path, or a URL in an object store.

    `is_registered`: the catalog has the table. Where it has not, it would be made there.
    """

    folder: str
    is_registered: bool


@dataclass(frozen=True, slots=True, init=False)
class CatalogTable:
    """A Delta table by its name in Spark's session catalog: ``DeltaSink(CatalogTable("lake.orders"))``.

    The name is ``SCHEMA.TABLE`` or ``spark_catalog.SCHEMA.TABLE``; a part with other characters than letters, digits and
    underscores stands in backquotes, as in SQL. Upper and lower case are one, as in Spark.

    When a run starts, the catalog of the process's Spark says in which folder the table is, and from then on the sink writes
    to that folder: guarantees, claims and committers are those of ``DeltaSink(path)``. Spark is that of the engine, or is
    started for it, which takes 5 to 25 seconds. A table that is missing is made, in the folder that the catalog has for it;
    its schema must be there.

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

    def place(self, where: str) -> TableLocation:
        """Where the catalog says that the table is now, or would be.

        Nothing of the table itself is read, so that a log that a power loss tore can be found and repaired.

        Raises:
            SettingsError: Spark does not start.
            SinkRefused: the name leads to something else, to a schema that is missing, or to tables that are not written by
                path; or the table is missing in a catalog that is in memory, which would forget it.
            StoreUnavailable: the catalog does not answer.
        """
        session, where = self._session(where)
        found = self._entry(session, where)
        if found is None:
            if _forgets(session):
                raise SinkRefused(
                    f"{where} is not there, and is not made: this Spark's catalog is in memory and begins empty. For one "
                    "that lasts set spark.sql.catalogImplementation=hive, or make the table with CREATE TABLE ... USING "
                    "delta",
                    problem=SinkProblem.TABLE_GONE,
                )
            with _asked(where):
                would_be = self._catalog(session).defaultTablePath(self._identifier(session))
                return TableLocation(_as_path(str(would_be)), False)
        view = str(found.tableType().name()) == "VIEW"
        made: Any = found.provider()
        provider = str(made.get()).lower() if made.isDefined() else "no provider"
        if view or provider != "delta":
            what = "a view" if view else f"a table of {provider}"
            raise SinkRefused(f"{where} is {what}, and no Delta table; name a table that was made with USING delta")
        return TableLocation(_as_path(str(found.location().toString())), True)

    def require_free(self, folder: str, identity: SinkIdentity, where: str, *, create: bool) -> None:
        """Of a table that the catalog does not have: refuse to make it where it was there before, or is somebody else's.

        Raises:
            SinkRefused: not `create`; or `folder` has files, and this life did not make them.
        """
        is_there = is_table(folder)
        if not create and is_there:
            raise SinkRefused(self.dropped(folder, where))
        if not create:
            raise SinkRefused(
                f"{where}: table {self} is not in the catalog any more, nor is it in its folder",
                problem=SinkProblem.TABLE_GONE,
            )
        # A driver may have died when it had made the table, and not registered it: then that life's claim is in it.
        if is_there and not is_claimed_by(load_table(folder), identity):
            raise SinkRefused(
                f"{where}: table {self} is not in the catalog, and the folder where it would be made has a Delta table "
                f"already. Move that away, or write to it: {self._statement(folder)}"
            )
        log = os.path.basename(DeltaLog(folder).folder)
        others = [] if is_there else [name for name in files_at(folder).list(folder) if name != log]
        if others:
            raise SinkRefused(
                f"{where}: table {self} is not in the catalog, and the folder where it would be made is not empty "
                f"({shown(min(others))}, say): a VACUUM of the table would remove what is there. Move it away"
            )

    def dropped(self, folder: str, where: str) -> str:
        """Why a table that is in its folder, and not in the catalog, is not written to."""
        return (
            f"{where}: table {self} is not in the catalog any more: it was dropped, and its folder is still there. To go on "
            f"with it, register it again: {self._statement(folder)}"
        )

    def register(self, folder: str, where: str) -> None:
        """Have the catalog know the table that was made in `folder`, as an external one.

        Called again for the same folder, it does no harm: a driver may have died between the two.

        Raises:
            SinkRefused: another table has got the name meanwhile.
            StoreUnavailable: the catalog refuses, or does not answer.
        """
        session, shown_as = self._session(where)
        statement = self._statement(folder)
        try:
            with _asked(shown_as):
                session.sql(statement.replace("CREATE TABLE", "CREATE TABLE IF NOT EXISTS", 1))
        except StoreUnavailable as error:
            raise StoreUnavailable(
                f"{error.message}. The table was made in {folder} and is not in the catalog yet; the next start registers "
                f"it, and so does: {statement}"
            ) from error
        place = self.place(where)
        if place != TableLocation(folder, True):
            raise SinkRefused(
                f"{shown_as} was made by somebody else meanwhile, in {place.folder}; this sink made one in {folder}. Keep "
                "one of the two under that name, move the other away, and start again"
            )

    def _statement(self, folder: str) -> str:
        return f"CREATE TABLE {self} USING delta LOCATION {spark_literal(folder)}"

    def _session(self, where: str) -> tuple[SparkSession, str]:
        """The process's Spark, whose catalog leaves commits to the logs; and how errors call the table."""
        session = spark_of_process(where, "its name is looked up in Spark's catalog")
        where = f"{where}: table {self}"
        kind = str(session.conf.get(f"spark.sql.catalog.{SESSION_CATALOG}", "Spark's own"))
        if kind != DELTA_CATALOG:
            raise SinkRefused(
                f"{where}: the session's catalog is {kind}, which may take the commits of its tables itself; only "
                f"spark.sql.catalog.{SESSION_CATALOG}={DELTA_CATALOG} is served. Use that one, or name the table's folder: "
                "DeltaSink(path)"
            )
        return session, where

    def _catalog(self, session: SparkSession) -> Any:
        """The session's `org.apache.spark.sql.catalyst.catalog.SessionCatalog`."""
        java: Any = session._jsparkSession  # pyright: ignore[reportPrivateUsage] - no public way
        return java.sessionState().catalog()

    def _identifier(self, session: SparkSession) -> Any:
        java: Any = session._jsparkSession  # pyright: ignore[reportPrivateUsage] - no public way
        quoted = f"{spark_quoted(self.schema)}.{spark_quoted(self.table)}"
        return java.sessionState().sqlParser().parseTableIdentifier(quoted)

    def _entry(self, session: SparkSession, where: str) -> Any:
        """The catalog's entry, an `org.apache.spark.sql.catalyst.catalog.CatalogTable`; None: there is no such table."""
        from pyspark.errors import AnalysisException

        with _asked(where):
            try:
                return self._catalog(session).getTableMetadata(self._identifier(session))
            except AnalysisException as error:
                if condition_of(error) == "SCHEMA_NOT_FOUND":
                    raise SinkRefused(
                        f"{where} is not there, nor is its schema: make that with CREATE SCHEMA {_shown(self.schema)}",
                        problem=SinkProblem.TABLE_GONE,
                    ) from error
                if condition_of(error) == "TABLE_OR_VIEW_NOT_FOUND":
                    return None
                raise


def _forgets(session: SparkSession) -> bool:
    """Whether the catalog is in memory: it ends with the process."""
    return session.conf.get("spark.sql.catalogImplementation", "in-memory") == "in-memory"


@contextmanager
def _asked(where: str) -> Generator[None]:
    """What the catalog's errors mean."""
    from py4j.protocol import Py4JError
    from pyspark.errors.exceptions.base import PySparkException

    try:
        yield
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
