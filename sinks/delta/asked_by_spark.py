"""The same question as in `asked_rows`, put to Spark, for tables that Spark commits to.

Spark reads the prepared files once, and computes what the commit would: generated columns, defaults, folds. What cannot be
known before a commit is an identity column's value: a constraint that names one, or a column generated from one, is not
asked.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from deltalake import DeltaTable

from stormproof.core.errors import StoreUnavailable
from stormproof.core.sink import SinkInput
from stormproof.sinks.delta.asked_rows import FILE, ROW, refused_by
from stormproof.sinks.delta.checks import TableRule, rules_of
from stormproof.sinks.delta.features import DEFAULT, GENERATED, IDENTITY
from stormproof.sinks.delta.folds import spark_fold_expression, spark_quoted
from stormproof.sinks.delta.merge_sql import HELD, is_written, merged_columns, ranges, same_key
from stormproof.sinks.delta.spark import SparkCommitter, spark_errors
from stormproof.sinks.protocol import PreparedTransaction, RefusedRow
from stormproof.sinks.rejects import LEFT_OUT_MAX, ROW_TEXT_MAX, Rejects

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

log = logging.getLogger("stormproof.sink")

_RULE: Final = "_stormproof_rule"


class AskSpark:
    """See `asked_rows.Ask`. All rows of the batch are asked at the first call, which is one job."""

    def __init__(
        self,
        spark: SparkCommitter,
        table: DeltaTable,
        directory: str,
        transaction: PreparedTransaction,
        input_: SinkInput,
        where: str,
    ) -> None:
        self._spark = spark
        self._table = table
        self._directory = directory
        self._transaction = transaction
        self._input = input_
        self._where = where
        self._told: set[tuple[str, int]] = set()

    def __call__(self, rejects: Rejects) -> Iterator[RefusedRow]:
        """The rows that the table refuses of those that are given.

        Raises:
            StoreUnavailable: the machine lacks what the question takes.
        """
        for part in rejects.kept():
            wrong = self._wrong.get(part.file, {})
            for number in part.numbers[np.isin(part.numbers, list(wrong))].tolist():
                if (part.file, number) not in self._told:
                    self._told.add((part.file, number))
                    yield wrong[number]

    @functools.cached_property
    def _wrong(self) -> Mapping[str, Mapping[int, RefusedRow]]:
        """Each row that violates a rule, superseded ones among them, by its file and its number."""
        from pyspark.sql.functions import col, expr, struct, to_json

        files, names = self._transaction.files, self._input.schema.names
        paths = {os.path.basename(file.path): file.path for file in files}
        found: dict[str, dict[int, RefusedRow]] = {}
        try:
            with spark_errors():
                added = self._spark.prepared_rows(self._directory, files, names, numbered=(FILE, ROW))
                frame = self._computed(self._merged(added))
                rules = self._rules()
                cases = " ".join(
                    f"WHEN NOT COALESCE({rule.expression}, false) THEN {i}" for i, rule in enumerate(rules)
                )
                if not cases:
                    return {}
                values = [spark_quoted(name) for name in frame.columns if name not in (FILE, ROW)]
                shown = to_json(struct(*values), {"ignoreNullFields": "false"})
                asked = frame.withColumn(_RULE, expr(f"CASE {cases} END")).where(col(_RULE).isNotNull())
                rows = asked.select(FILE, ROW, _RULE, shown).limit(LEFT_OUT_MAX + 1).collect()
        except OSError as error:
            raise StoreUnavailable(f"{self._where}: its constraints cannot be asked: {error}") from error
        except ValueError as error:
            # The commit's own refusal, which names no row, is what the caller then has.
            log.warning("%s: which rows the table refuses cannot be told: %s", self._where, error)
            return {}
        for file, number, rule, text in rows:
            path = paths[file]
            row = json.loads(text) if len(text) < ROW_TEXT_MAX else {"row": text[:ROW_TEXT_MAX]}
            found.setdefault(path, {})[number] = refused_by(rules[rule], path, number, row)
        return found

    def _rules(self) -> list[TableRule]:
        return ranges(self._input, spark_quoted) + [rule for rule, told in self._table_rules() if told]

    def untold(self) -> str:
        """The constraints that are not asked, with the remedy, for the error of a batch that the table refuses; "": none."""
        names = [rule.text for rule, told in self._table_rules() if not told]
        return (
            f". Which rows {' and '.join(names)} refuses cannot be told before the commit: it names an identity column. "
            "Drop it, or have it name other columns; then retry the txid, or give up its rows at this sink"
            if names
            else ""
        )

    def _table_rules(self) -> list[tuple[TableRule, bool]]:
        """The table's rules, and of each whether it can be asked."""
        fields = self._table.schema().fields
        untold = [
            field.name
            for field in fields
            if any(key.startswith(IDENTITY) for key in field.metadata) and field.name not in self._input.schema.names
        ]
        untold += [field.name for field in fields if _names(str(field.metadata.get(GENERATED, "")), untold)]
        return [
            (rule, not _names(rule.expression, untold))
            for rule in rules_of(self._table, self._transaction.files, spark_quoted)
        ]

    def _merged(self, added: DataFrame) -> DataFrame:
        """The rows as the MERGE would leave them, or as they are appended; without generated columns."""
        input_ = self._input
        if not input_.is_by_key:
            return added
        from pyspark.sql.functions import expr, lit

        table = [field.name for field in self._table.schema().fields if GENERATED not in field.metadata]
        held = self._spark.rows().select(*map(spark_quoted, table)).withColumn(HELD, lit(True))
        rows = added.alias("s").join(held.alias("t"), expr(same_key(input_, spark_quoted)), "left")
        if (written := is_written(input_, spark_quoted)) is not None:
            rows = rows.where(written)
        columns = merged_columns(
            table,
            input_,
            spark_quoted,
            lambda name, fold: spark_fold_expression(name, input_.schema, fold, tried=True),
            self._default,
        )
        return rows.selectExpr(*columns, f"s.{FILE}", f"s.{ROW}")

    def _computed(self, frame: DataFrame) -> DataFrame:
        """With the table's types, defaults of columns that are not there, and generated columns."""
        from pyspark.sql.functions import expr

        types = {field.name: field.dataType for field in self._spark.rows().schema.fields}
        generated: dict[str, str] = {}
        for field in self._table.schema().fields:
            name = field.name
            if name in frame.columns:
                frame = frame.withColumn(name, frame[spark_quoted(name)].cast(types[name]))
            elif GENERATED in field.metadata:
                generated[name] = str(field.metadata[GENERATED])
            else:
                frame = frame.withColumn(name, expr(self._default(name)).cast(types[name]))
        for name, expression in generated.items():
            frame = frame.withColumn(name, expr(expression).cast(types[name]))
        return frame

    def _default(self, name: str) -> str:
        field = next(field for field in self._table.schema().fields if field.name == name)
        return str(field.metadata.get(DEFAULT, "NULL"))


def _names(expression: str, columns: Sequence[str]) -> bool:
    """Whether an expression may name one of these columns."""
    return any(re.search(rf"(?i)(?<!\w){re.escape(name)}(?!\w)", expression) for name in columns)
