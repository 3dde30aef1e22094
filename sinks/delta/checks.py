"""A table's CHECK constraints, asked of prepared files before the table's log adopts them."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from deltalake import DeltaTable, Field, QueryBuilder, Schema
from deltalake.exceptions import DeltaError
from deltalake.transaction import AddAction, RemoveAction

from stormproof.core.errors import SinkRefused, StoreUnavailable
from stormproof.core.folds import Fold
from stormproof.core.sink import PreparedFile, SinkInput, SinkMode
from stormproof.core.storage.files import files_at
from stormproof.sinks.delta.failures import may_pass, panics_as_errors, shown
from stormproof.sinks.delta.newest_version import TableHead
from stormproof.sinks.merge_sql import FITS, Quoted, quoted
from stormproof.sinks.partitions import partition_values

CONSTRAINT: Final = "delta.constraints."

_TEXTS: Final = re.compile(r"'[^']*'|`[^`]*`")
"""Texts and quoted names in an expression."""


def checks_of(settings: Mapping[str, str]) -> dict[str, str]:
    """The constraints by their names, each an expression in SQL."""
    return {key.removeprefix(CONSTRAINT): text for key, text in settings.items() if key.startswith(CONSTRAINT)}


def dividing(settings: Mapping[str, str]) -> tuple[str, ...]:
    """The constraints whose expressions divide. delta-rs divides integers without their remainder, and Spark does not: the
    two would let different rows in.
    """
    return tuple(name for name, text in checks_of(settings).items() if "/" in _TEXTS.sub("", text))


@dataclass(frozen=True, slots=True)
class TableRule:
    """What a table asks of each row: an expression in SQL that has to be true, NULL is not. `text` names it in errors."""

    name: str
    expression: str
    text: str


def rules_of(table: TableHead, files: Sequence[PreparedFile], quote: Quoted = quoted) -> list[TableRule]:
    """The table's CHECK constraints, and those of its NOT NULL columns in which these files have NULL.

    `quote` quotes a column's name as the SQL does that is to be asked.
    """
    checks = [
        TableRule(name, expression, f"the table's CHECK constraint {name!r} ({expression})")
        for name, expression in checks_of(table.metadata().configuration).items()
    ]
    return checks + [
        TableRule(name, f"{quote(name)} IS NOT NULL", f"the NOT NULL of the table's column {name!r}")
        for name in dict.fromkeys(name for file in files for name in lacking(table, file))
    ]


def ranges(input_: SinkInput, quoted: Quoted) -> list[TableRule]:
    """What is asked of the sums in `merge_sql.merged_columns`."""
    sums = [name for name, fold in input_.folds.items() if fold is Fold.SUM]
    return [TableRule(name, quoted(FITS + name), f"the range of its column {name!r}") for name in sums]


def lacking(table: TableHead, file: PreparedFile) -> list[str]:
    """The table's NOT NULL columns in which a prepared file has NULL, by its statistics.

    They may be others than when the rows were checked.
    """
    values, nulls = partition_values(file), json.loads(file.statistics).get("nullCount", {})
    found = {name for name, value in values.items() if value is None}
    found |= {name for name, count in nulls.items() if isinstance(count, int) and count}
    return [field.name for field in table.schema().fields if not field.nullable and field.name in found]


def violates(table: TableHead, directory: str, files: Sequence[PreparedFile], where: str) -> bool:
    """Whether a row of prepared files violates a rule, be it one that a later row of its key supersedes.

    Raises:
        SinkRefused: delta-rs cannot evaluate a constraint.
        StoreUnavailable: the machine lacks what the question takes.
    """
    rules = rules_of(table, files)
    if not rules or not any(file.rows for file in files):
        return False
    # The files are read through a table of their own, in a folder that lasts as long as the question.
    with tempfile.TemporaryDirectory(prefix="stormproof-check-") as folder:
        asked = QueryBuilder().register("t", _table_of(table, directory, files, folder))
        for rule in rules:
            with asking(rule, where):
                counted = pa.table(asked.execute(f"SELECT count(*) AS n FROM t WHERE ({rule.expression}) IS NOT TRUE"))
            if counted.column("n")[0].as_py():
                return True
    return False


def may_reject(table: TableHead, input_: SinkInput) -> bool:
    """Whether a message can be rejected at a commit to this table: it has constraints, and the rows are whole ones. A fold's
    row is the result of several.
    """
    return input_.mode in (SinkMode.APPEND, SinkMode.UPSERT) and bool(checks_of(table.metadata().configuration))


@contextmanager
def asking(rule: TableRule, where: str) -> Generator[None]:
    """Ask delta-rs about a rule.

    Raises:
        SinkRefused: it cannot evaluate the expression.
        StoreUnavailable: the machine lacks what the question takes.
    """
    try:
        with panics_as_errors():
            yield
    except (DeltaError, OSError, ValueError) as error:
        if may_pass(error):
            raise StoreUnavailable(f"{where}: its constraints cannot be asked: {shown(error)}") from error
        raise SinkRefused(
            f"{where}: delta-rs cannot evaluate {rule.text}: {shown(error)}; nothing was written; give DeltaSink "
            "committer='spark'",
            constraint=rule.name,
        ) from error


def _table_of(table: TableHead, directory: str, files: Sequence[PreparedFile], folder: str) -> DeltaTable:
    """A table in `folder` that has these files, by links to them or copies, and nothing else."""
    # The files of an append are cut by partition; those of an upsert have all columns.
    columns = table.metadata().partition_columns if any(file.partition for file in files) else []
    made = DeltaTable.create(folder, plain_schema(table), partition_by=columns)
    there = [file for file in files if file.rows]
    for file in there:
        files_at(directory).bring(os.path.join(directory, file.path), os.path.join(folder, file.path))
    # Without statistics: a row is looked at, whatever they say of it.
    added: list[AddAction | RemoveAction] = [
        AddAction(f.path, f.bytes, partition_values(f), 0, data_change=True, stats="{}") for f in there
    ]
    made.create_write_transaction(added, "append", made.schema(), columns)
    return DeltaTable(folder)


def plain_schema(table: TableHead) -> Schema:
    """A table's columns, without what its log says of them beyond their types."""
    return Schema([Field(f.name, f.type) for f in table.schema().fields])
