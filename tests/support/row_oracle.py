"""An oracle of rows: random tables under random steps, compared after each step with a plain model, by three readers.

A table is made by us, by delta-rs or by Spark, with odd names and any type as key, partition and value. The model is a dict
of rows. Each step commits, compacts, vacuums, has another writer append or MERGE, opens the table anew, or has the driver
die. Half of the tables get checkpoints behind some of their steps, and lose the log entries before some of these. After
each step delta-rs, DuckDB and at times Spark read the whole table, and each again with a filter, which has them pass over
files by their bounds and partitions.
"""

from __future__ import annotations

import datetime as dt
import json
import math
import operator
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.compute as pc
from deltalake import DeltaTable, Schema, write_deltalake

from stormproof.core.base.errors import SinkRefused, TopologyError
from stormproof.core.base.failpoint import FailpointReached, watched
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.fold import Fold
from stormproof.core.contract.schema import can_be_key
from stormproof.core.contract.sink import SinkInput, SinkMode, TaskContext, transaction_digest
from stormproof.core.graph.aggregation import has_extremes
from stormproof.sinks.contract.protocol import PreparedTransaction, SinkIdentity
from stormproof.sinks.delta.log import DeltaLog, checksum_of
from stormproof.sinks.delta.session import DeltaSession
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.delta.statistics import WITH_STATISTICS
from stormproof.sinks.delta.versions import panics_as_errors
from stormproof.sinks.rows.merge_sql import quoted, spark_quoted
from support import duck
from support.random_tables import shown
from support.typed_rows import EDGES

if TYPE_CHECKING:
    from pyspark.sql import Column, SparkSession

STEPS: Final = 30
SPARK_READS: Final = 0.12
"""Of all steps, after so many Spark reads, too, where there is one."""

CHECKPOINTED: Final = 0.5
CHECKPOINTS: Final = 0.3
CLEANED: Final = 0.3
"""So many tables have checkpoints, behind so many of their steps, and so many of these take the entries before them away."""

Row: TypeAlias = dict[str, Any]

_NO_FOLDERS: Final = (b"", b"\x00\xff")

_SAFE: Final = ("a", "é", "select", "Größe", "x_1")
_NAMES: Final = (*_SAFE, "B c", 'd"e', "f.g", "h`i", "j'k", "städte %41", "a=b")
"""Spark writes to no table with a column whose name has a space or an equals sign, unless its columns are mapped."""

_WIDE: Final = ((18, 2), (19, 3), (20, 0), (28, 10), (38, 0), (38, 18), (38, 38))
_OF_SESSION: Final = {
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.timestampType": "TIMESTAMP_NTZ",  # else it takes Arrow's timestamps without a zone for others
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",  # Arrow reads the default as the years 1677 to 2262
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.sql.shuffle.partitions": "2",
}
_POINTS: Final = ("delta.after_check", "delta.after_log_entry", "delta.after_sync")
_COMPACTING: Final = ("compact.before", "compact.after_log_entry", "compact.after_sync")


def _pools() -> Iterator[tuple[pa.DataType, list[Any]]]:
    """Each type with the values that rows have of it, the odd and the extreme ones among them."""
    more: Mapping[str, list[Any]] = {
        "string": ["Zürich", "北京", "a b/c", "é=", "%41", "a'b", "x" * 40, "x" * 40 + "y"],
        "date": [dt.date(2026, 3, day) for day in (1, 2, 28)],
        "bigint": [2**53, 2**53 - 1, 7],
        "double": [1.5, 0.1, 1e300],
        "float": [1.5, 16777216.0],
        "binary": [b"abc", b"a" * 40 + b"b", b"a" * 40],
    }
    for name, column in EDGES.items():
        values = [value for value in column.to_pylist() if value is not None]
        yield column.type, [*values, *more.get(name, [])]
    for precision, scale in _WIDE:
        digits = [int(("1234567890" * 4)[:precision]) + n for n in (-1, 0, 1)] + [10**precision - 1, 1 - 10**precision]
        yield pa.decimal128(precision, scale), [Decimal(f"{n}E-{scale}") for n in (*digits, 0, 1)]


_POOLS: Final = [*_pools()]


@dataclass(frozen=True, slots=True)
class Shape:
    """What is drawn of a table before its first step."""

    maker: str
    mode: SinkMode
    schema: pa.Schema
    key: str
    partition: tuple[str, ...]
    pools: Mapping[str, list[Any]]

    def __str__(self) -> str:
        """For the line of a failure."""
        columns = ", ".join(f"{f.name!r} {f.type}" for f in self.schema)
        return f"{self.mode} by {self.maker}, key {self.key!r}, partitioned by {self.partition}: {columns}"

    @property
    def folds(self) -> dict[str, Fold]:
        """Of a fold."""
        kinds = [Fold.SUM, Fold.MIN, Fold.MAX]
        return dict(zip((name for name in self.schema.names if name != self.key), kinds, strict=False))

    @property
    def input(self) -> SinkInput:
        """What the sink is given."""
        match self.mode:
            case SinkMode.APPEND:
                return SinkInput(self.schema)
            case SinkMode.UPSERT:
                return SinkInput.for_upsert(self.schema, (self.key,), ("at",))
            case SinkMode.FOLD:
                return SinkInput.for_fold(self.schema, (self.key,), self.folds)

    @staticmethod
    def drawn(rng: random.Random, makers: Sequence[str]) -> Shape:
        """One that a sink may take."""
        maker, mode = rng.choice(makers), rng.choice([*SinkMode])
        names = rng.sample(_SAFE if "Spark" in makers else _NAMES, 4)
        kinds: dict[str, tuple[pa.DataType, list[Any]]] = {name: rng.choice(_POOLS) for name in names}
        key, first, second, third = names
        if mode is SinkMode.APPEND:
            kinds = {"i": (pa.int64(), []), **kinds}
            key = "i"
        else:
            kinds[key] = rng.choice([p for p in _POOLS if can_be_key(p[0]) and p[0] != pa.bool_()])
        if mode is SinkMode.UPSERT:
            kinds["at"] = pa.int64(), []
        if mode is SinkMode.FOLD:
            sums: list[tuple[pa.DataType, list[Any]]] = [
                (pa.int64(), [1, 2, -3]),
                (pa.decimal128(38, 10), [Decimal("12345678901234567.0123456789"), Decimal(1)]),
            ]
            extremes = [(kind, _ordered(values)) for kind, values in _POOLS if has_extremes(kind)]
            kinds[first], kinds[second], kinds[third] = rng.choice(sums), rng.choice(extremes), rng.choice(extremes)
        may_part = [key] if mode is SinkMode.FOLD else [n for n in kinds if n not in ("i", "at")]
        flat = [name for name in may_part if not pa.types.is_nested(kinds[name][0])]
        partition = (rng.choice(flat),) if flat and rng.random() < 0.6 else ()
        schema = pa.schema([(name, kind) for name, (kind, _) in kinds.items()])
        return Shape(maker, mode, schema, key, partition, {name: values for name, (_, values) in kinds.items()})


def _ordered(values: list[Any]) -> list[Any]:
    """Without those that no order of Python's has."""
    return [v for v in values if not (isinstance(v, float) and (math.isnan(v) or v == 0.0))]


MAKERS: Final = ("us", "us", "delta-rs")
WITH_SPARK: Final = ("us", "delta-rs", "Spark")


@dataclass(slots=True)
class Oracle:
    """One table by its seed, and the model of its rows."""

    folder: Path
    seed: int
    spark: SparkSession | None = None
    makers: Sequence[str] = MAKERS
    lake: Any = field(default_factory=duck.connected)
    told: Counter[str] = field(default_factory=Counter[str])
    """How often each step was made, and each reader has read."""
    model: dict[Any, Row] = field(default_factory=dict[Any, Row])
    history: list[str] = field(default_factory=list[str])
    txid: int = 0
    epoch: int = 0
    numbers: int = 0
    rng: random.Random = field(init=False)
    apart: random.Random = field(init=False)
    """Of what is drawn of checkpoints: the steps of a seed are the same without them."""
    has_checkpoints: bool = field(init=False)
    path: Path = field(init=False)
    shape: Shape = field(init=False)
    sink: DeltaSink = field(init=False)
    session: DeltaSession = field(init=False)

    def play(self, steps: int = STEPS) -> None:
        """Make the table and play it.

        Raises:
            AssertionError: a reader found other rows; names the seed, the table, the steps and the rows.
        """
        self.rng, self.apart = random.Random(self.seed), random.Random(f"checkpoints of {self.seed}")
        self.has_checkpoints = self.apart.random() < CHECKPOINTED
        if self.spark is not None:
            self.spark = self.spark.newSession()
            for name, value in _OF_SESSION.items():
                self.spark.conf.set(name, value)
        self.path = self.folder / self.rng.choice(["t", "tä b"])
        while not self._made():
            pass
        kept = [self._commit, self._commit, self._commit, self._foreign_append, self._foreign_merge]
        for _ in range(steps):
            step = self.rng.choice(
                [*kept, self._compact, self._vacuum, self._restart, self._kill, self._kill_compaction]
            )
            self.history.append(step.__name__.strip("_"))
            self.told[self.history[-1]] += 1
            try:
                step()
                if self.has_checkpoints and self.apart.random() < CHECKPOINTS:
                    self._checkpoint()
            except Exception as error:
                raise AssertionError(f"{self._where()}: {type(error).__name__}: {error}") from error
            self._compare()
        self.session.close()

    # -- the table ---------------------------------------------------------------------------------------------------

    def _made(self) -> bool:
        """False where no sink takes what was drawn."""
        self.shape = shape = Shape.drawn(self.rng, self.makers)
        self.sink = DeltaSink(self.path, name="t", partition_by=shape.partition)
        try:
            self.sink.check(shape.input, Guarantee.EXACTLY_ONCE)
        except TopologyError:
            return False
        if self._spells_wrong() and (shape.maker == "delta-rs" or self.spark is None):
            return False  # Spark commits to most of these tables
        if shape.maker == "us":
            return self._opened()
        rows = self._rows(new=True)
        if shape.maker == "delta-rs":
            DeltaTable.create(self.path, Schema.from_arrow(shape.schema), partition_by=[*shape.partition])
            self._by_another(lambda: self._append_by_delta_rs(rows), rows)
        else:
            self._make_by_spark(rows)
            self._merge(rows)
        return self._opened()

    def _make_by_spark(self, rows: list[Row]) -> None:
        """Without Spark, as it spells paths."""
        parts = [*self.shape.partition]
        if self.spark is not None:
            self._frame(rows).write.format("delta").partitionBy(*parts).save(str(self.path))
            return
        write_deltalake(self.path, self._table(rows), partition_by=parts)
        _respell(self.path)
        _take_bounds_away(DeltaLog(str(self.path)).entry_path(0))

    def _opened(self) -> bool:
        try:
            self._restart()
        except (SinkRefused, TopologyError):
            self.told["refused"] += 1
            self.model.clear()
            self.folder = self.folder / "next"
            self.path = self.folder / "t"
            return False
        return True

    def _restart(self) -> None:
        """A driver that was killed closes nothing."""
        self.epoch += 1
        identity = SinkIdentity("oracle", "inc-1", "t")
        session = self.sink.open(identity, self.shape.input, self.epoch)
        assert isinstance(session, DeltaSession)
        self.session = session

    # -- rows --------------------------------------------------------------------------------------------------------

    def _rows(self, *, new: bool = False, ours: bool = False) -> list[Row]:
        """Rows of distinct keys; all `new` where asked. Others partition by no empty text, which readers read unlike, and by
        no bytes that are no name of a folder.
        """
        shape, rows = self.shape, dict[Any, Row]()
        for _ in range(self.rng.randint(1, 5)):
            row = {name: self._value(name) for name in shape.schema.names}
            if not ours:
                row |= {name: "x" for name in shape.partition if row[name] == ""}
                row |= {name: b"x" for name in shape.partition if row[name] in _NO_FOLDERS}
            if shape.mode is SinkMode.APPEND:
                self.numbers += 1
                row[shape.key] = self.numbers
            if "at" in row and shape.mode is SinkMode.UPSERT:
                self.numbers += 1
                late = self.rng.random() < 0.2
                row["at"] = -self.numbers if late else self.numbers
            rows[shown(row[shape.key])] = row
        drawn = [row for key, row in rows.items() if not new or key not in self.model]
        spelled: list[Row] = self._table(drawn).to_pylist()  # a decimal with all of its digits
        return spelled

    def _value(self, name: str) -> Any:
        if name != self.shape.key and self.rng.random() < 0.1:
            return None
        return self.rng.choice(self.shape.pools[name] or [None])

    def _table(self, rows: list[Row]) -> pa.Table:
        return pa.Table.from_pylist(rows, self.shape.schema)

    def _merge(self, rows: list[Row], *, ours: bool = False) -> None:
        """Into the model; another writer's rows replace those of their keys whatever they are."""
        for row in rows:
            key = shown(row[self.shape.key])
            held = self.model.get(key)
            if held is None or not ours:
                self.model[key] = row
            elif self.shape.mode is SinkMode.UPSERT:
                self.model[key] = max(held, row, key=lambda one: one["at"])
            else:
                folds = self.shape.folds
                self.model[key] = {name: _folded(folds.get(name), held[name], row[name]) for name in row}

    # -- steps -------------------------------------------------------------------------------------------------------

    def _prepared(self) -> tuple[PreparedTransaction, list[Row]]:
        """A transaction; rows that the sink refuses fail their messages, and are in none."""
        self.txid += 1
        rows = self._rows(ours=True)
        writer = self.session.writer()
        while refused := {number for batch in self._table(rows).to_batches() for number, _ in writer.check(batch)}:
            rows = [row for number, row in enumerate(rows) if number not in refused]
            self.told["rows refused"] += len(refused)
        task = writer.open_task(TaskContext("inc-1", self.txid, 1, 0), self.shape.schema)
        for batch in self._table(rows).to_batches():
            task.write(batch)
        files = tuple(task.close())
        held = self.session.held()
        previous = None if held is None else held.txid
        return PreparedTransaction(self.txid, previous, transaction_digest(files), len(rows), files), rows

    def _commit(self) -> None:
        prepared, rows = self._prepared()
        self.session.commit(prepared, checked=True)
        self.session.finished(prepared)
        self._merge(rows, ours=True)

    def _kill(self) -> None:
        """A driver dies in its commit, and the next one goes on with it."""
        prepared, rows = self._prepared()
        self._dies(self.rng.choice(_POINTS), lambda: self.session.commit(prepared, checked=True))
        self.session.commit(prepared, checked=True)
        self.session.finished(prepared)
        self._merge(rows, ours=True)

    def _kill_compaction(self) -> None:
        self._dies(self.rng.choice(_COMPACTING), self.session.compact)

    def _dies(self, point: str, act: Callable[[], object]) -> None:
        def die(name: str) -> None:
            if name == point:
                raise FailpointReached(point)

        with suppress(FailpointReached), watched(die):
            act()
        self._restart()

    def _compact(self) -> None:
        self.session.compact()

    def _vacuum(self) -> None:
        self.session.vacuum(0)

    def _checkpoint(self) -> None:
        """None where the version has one: behind a second one, by Spark, DuckDB loses partitions (see limits.md)."""
        if DeltaTable(self.path).version() in DeltaLog(str(self.path)).checkpoints():
            return
        if self.spark is not None and self.apart.random() < 0.5:
            checkpoint_by_spark(self.spark, self.path)
        else:
            DeltaTable(self.path).create_checkpoint()
        self.told["checkpoint"] += 1
        self.history[-1] += ", checkpoint"
        if self.apart.random() < CLEANED:
            self.history[-1] += " and no entry before it"
            log = DeltaLog(str(self.path))
            for version in log.versions()[:-1]:
                for name in (log.entry_path(version), checksum_of(log.entry_path(version))):
                    Path(name).unlink(missing_ok=True)

    def _foreign_append(self) -> None:
        rows = self._rows(new=True)
        if self._is_sparks_turn():
            self._frame(rows).write.format("delta").mode("append").save(str(self.path))
            self._merge(rows)
        elif rows:
            self._by_another(lambda: self._append_by_delta_rs(rows), rows)

    def _append_by_delta_rs(self, rows: list[Row]) -> None:
        write_deltalake(self.path, self._table(rows), mode="append")

    def _by_another(self, write: Callable[[], object], rows: list[Row]) -> None:
        """By delta-rs itself, but where it spells partition values wrong: nobody could read the table."""
        if self._spells_wrong():
            return
        with panics_as_errors():
            write()
        _take_bounds_away(DeltaLog(str(self.path)).entry_path(DeltaTable(self.path).version()))
        self._merge(rows)

    def _spells_wrong(self) -> bool:
        kinds = [self.shape.schema.field(name).type for name in self.shape.partition]
        return (self.shape.maker == "Spark" and bool(self.history)) or any(
            pa.types.is_decimal(k)
            or pa.types.is_floating(k)
            or pa.types.is_binary(k)
            or (pa.types.is_timestamp(k) and k.tz is not None)  # without a zone, which we refuse
            for k in kinds
        )

    def _foreign_merge(self) -> None:
        """Of delta-rs not into Spark's files: it spells some of their paths otherwise, and would keep both."""
        rows = self._rows()
        if self.shape.mode is SinkMode.APPEND and self.model:
            keys = self.rng.sample([*self.model], min(2, len(self.model)))
            rows = [row | {self.shape.key: key} for row, key in zip(rows, keys, strict=False)]
        if self.spark is None:
            names = {quoted(name): f"s.{quoted(name)}" for name in self.shape.schema.names}
            key = quoted(self.shape.key)
            merge = DeltaTable(self.path).merge(self._table(rows), f"t.{key} = s.{key}", "s", "t")
            self._by_another(merge.when_matched_update(names).when_not_matched_insert(names).execute, rows)
        else:
            from delta.tables import DeltaTable as OfSpark

            key = spark_quoted(self.shape.key)
            table = OfSpark.forPath(self.spark, str(self.path)).alias("t")
            merged = table.merge(self._frame(rows).alias("s"), f"t.{key} = s.{key}")
            merged.whenMatchedUpdateAll().whenNotMatchedInsertAll().execute()
            self._merge(rows)

    def _is_sparks_turn(self) -> bool:
        return self.spark is not None and self.rng.random() < 0.5

    def _frame(self, rows: list[Row]) -> Any:
        assert self.spark is not None
        return self.spark.createDataFrame(self._table(rows))

    # -- readers -----------------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        filters = [None, *(one for one in [self._filter() for _ in range(2)] if one is not None)]
        readers: dict[str, Callable[[Filter | None], pa.Table]] = {"DuckDB": self._by_duck}
        if not any(pa.types.is_decimal(self.shape.schema.field(name).type) for name in self.shape.partition):
            readers["delta-rs"] = self._by_delta_rs  # which reads no table that is partitioned by a negative decimal
        if self.spark is not None and self.rng.random() < SPARK_READS:
            readers["Spark"] = self._by_spark
        for one in filters:
            wanted = Counter(self._shown(row) for row in self.model.values() if one is None or one.takes(row))
            for reader, read in readers.items():
                if reader == "delta-rs" and one is not None and one.has_bounds_of_spark and self._may_have_them():
                    continue
                self.told[reader] += 1
                try:
                    rows = read(one).select(self.shape.schema.names).cast(self.shape.schema).to_pylist()
                except pa.ArrowNotImplementedError:
                    self.told["not compared"] += 1  # texts and bytes are views in a file of a MERGE by delta-rs
                    continue
                except Exception as error:
                    raise AssertionError(
                        f"{self._where()}: {reader}, {one}: {type(error).__name__}: {error}"
                    ) from error
                found = Counter(map(self._shown, rows))
                if found != wanted:
                    raise AssertionError(
                        f"{self._where()}: {reader}, {one}: lacks {[*(wanted - found)]}, has beyond it {[*(found - wanted)]}"
                    )

    def _may_have_them(self) -> bool:
        """Whether bounds of Spark's may be in use: it writes here, and no commit of ours has left columns out."""
        return self.spark is not None and WITH_STATISTICS not in DeltaTable(self.path).metadata().configuration

    def _where(self) -> str:
        return f"seed {self.seed}{'' if self.spark is None else ' with Spark'}, {self.shape}, after {self.history}"

    def _shown(self, row: Row) -> tuple[Any, ...]:
        return tuple(shown(row[name]) for name in self.shape.schema.names)

    def _filter(self) -> Filter | None:
        name = self.rng.choice(self.shape.schema.names)
        kind = self.shape.schema.field(name).type
        values = [v for row in self.model.values() if (v := row[name]) is not None and v == v]
        if pa.types.is_nested(kind) or not values or "." in name:  # DuckDB takes the dot for a field of a struct
            return None
        only_equal = pa.types.is_floating(kind) or pa.types.is_boolean(kind) or pa.types.is_binary(kind)
        return Filter(
            name,
            kind,
            self.rng.choice(["=" if only_equal else ">=", "=", "<=" if not only_equal else "="]),
            self.rng.choice(values),
        )

    def _by_delta_rs(self, one: Filter | None) -> pa.Table:
        table = DeltaTable(self.path).to_pyarrow_dataset()
        return table.to_table(filter=None if one is None else one.for_arrow())

    def _by_duck(self, one: Filter | None) -> pa.Table:
        where = "" if one is None else f" where {one.for_duck()}"
        path = str(self.path).replace("'", "''")
        return pa.table(self.lake.execute(f"select * from delta_scan('{path}'){where}").arrow())

    def _by_spark(self, one: Filter | None) -> pa.Table:
        assert self.spark is not None
        frame = self.spark.read.format("delta").load(str(self.path))
        return (frame if one is None else frame.where(one.for_spark())).toArrow()


def checkpoint_by_spark(session: Any, path: Path) -> None:
    """A checkpoint of the table's newest version."""
    logs = session._jvm.org.apache.spark.sql.delta.DeltaLog
    logs.clearCache()  # an entry may have other statistics than those that it read
    logs.forTable(session._jsparkSession, str(path)).checkpoint()


def _respell(path: Path) -> None:
    """Letters outside ASCII as they are, in paths and folders; delta-rs encodes them."""
    entry = Path(DeltaLog(str(path)).entry_path(0))
    actions = [json.loads(line) for line in entry.read_bytes().splitlines()]
    for add in (action["add"] for action in actions if "add" in action):
        written = unquote(add["path"])
        spelled = re.sub("(?:%[89A-F][0-9A-F])+", lambda found: unquote(found[0]), written)
        (path / spelled).parent.mkdir(exist_ok=True)
        (path / written).rename(path / spelled)
        add["path"] = spelled.replace("%", "%25").replace(" ", "%20")
    entry.write_text("\n".join(json.dumps(action, ensure_ascii=False) for action in actions))


def _take_bounds_away(entry: str) -> None:
    """What delta-rs's statistics get wrong in another writer's files is not ours."""
    actions = [json.loads(line) for line in Path(entry).read_bytes().splitlines()]
    for add in (action["add"] for action in actions if "add" in action):
        add["stats"] = json.dumps({"numRecords": json.loads(add["stats"])["numRecords"]})
    Path(entry).write_text("\n".join(json.dumps(action, ensure_ascii=False) for action in actions))


def _doubled(name: str) -> str:
    return name.replace('"', '""')


def _folded(fold: Fold | None, held: Any, added: Any) -> Any:
    if held is None or added is None or fold is None:
        return added if held is None else held
    if fold is Fold.SUM:
        return held + added
    return min(held, added) if fold is Fold.MIN else max(held, added)


@dataclass(frozen=True, slots=True)
class Filter:
    """Rows whose column compares so with a value; NULL with none."""

    name: str
    type: pa.DataType
    how: str
    value: Any

    @property
    def has_bounds_of_spark(self) -> bool:
        """Whether delta-rs's dataset takes bounds of Spark's for none, and then finds no row by them: Spark has none of
        booleans, and writes small decimals with an exponent, and the greatest of numbers with a NaN among them as a text.
        """
        return bool(
            pa.types.is_boolean(self.type)
            or pa.types.is_floating(self.type)
            or (pa.types.is_decimal(self.type) and self.type.scale > 6)
        )

    def takes(self, row: Row) -> bool:
        """By Python."""
        value = row[self.name]
        compare = {"=": operator.eq, ">=": operator.ge, "<=": operator.le}[self.how]
        return value is not None and bool(compare(value, self.value))

    def for_arrow(self) -> pc.Expression:
        """For delta-rs."""
        compare = {"=": operator.eq, ">=": operator.ge, "<=": operator.le}[self.how]
        found: pc.Expression = compare(pc.field((self.name,)), pa.scalar(self.value, self.type))
        return found

    def for_duck(self) -> str:
        """In SQL."""
        text = self.value.hex() if isinstance(self.value, bytes) else self._text()
        literal = f"'{text.replace(chr(39), chr(39) * 2)}'"
        literal = f"unhex({literal})" if isinstance(self.value, bytes) else f"cast({literal} as {self._sql('duck')})"
        return f'"{_doubled(self.name)}" {self.how} {literal}'

    def for_spark(self) -> Column:
        """As a column."""
        from pyspark.sql.functions import col, lit

        value = bytearray(self.value) if isinstance(self.value, bytes) else self._text()
        literal = lit(value) if isinstance(self.value, (bytes, str)) else lit(value).cast(self._sql("spark"))
        compare = {"=": operator.eq, ">=": operator.ge, "<=": operator.le}[self.how]
        found: Column = compare(col(spark_quoted(self.name)), literal)
        return found

    def _text(self) -> str:
        return f"{self.value:f}" if isinstance(self.value, Decimal) else str(self.value)

    def _sql(self, engine: str) -> str:
        kind = self.type
        if pa.types.is_decimal(kind):
            return f"decimal({kind.precision}, {kind.scale})"
        if pa.types.is_timestamp(kind):
            zoned, plain = ("timestamptz", "timestamp") if engine == "duck" else ("timestamp_ltz", "timestamp_ntz")
            return plain if kind.tz is None else zoned
        names = {"bool": "boolean", "int8": "tinyint", "int16": "smallint", "int32": "int", "int64": "bigint"}
        more = {"float": "float", "double": "double", "date32[day]": "date", "string": "string"}
        return {**names, **more}[str(kind)]
