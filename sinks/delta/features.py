"""Which committer writes to which Delta table: the features of tables, as data. The table in docs/delta.md is made from it.

delta-rs is the default: it commits in some 20 ms. Spark (delta-spark) takes a second or two, and writes every feature.
A feature that neither writes without harm is refused by its name.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, Literal, TypeAlias

from deltalake import DeltaTable, Schema

from stormproof.core.contract.sink import SinkInput, SinkMode
from stormproof.sinks.delta.log import paths_outside, respelled_paths, unzoned_values
from stormproof.sinks.delta.versions import TableHead


class Committer(StrEnum):
    """Who writes to a Delta table."""

    DELTA_RS = "delta-rs"
    SPARK = "spark"


GENERATED: Final = "delta.generationExpression"
DEFAULT: Final = "CURRENT_DEFAULT"
IDENTITY: Final = "delta.identity."
TEXT_TYPE: Final = "__CHAR_VARCHAR_TYPE_STRING"
"""Keys of a column's metadata, or how they begin."""
"""Of a generated column, the key of its expression in its metadata."""

AskedCommitter: TypeAlias = Literal["auto", "delta-rs", "spark"]
"""Who shall write, as a user says it; "auto": delta-rs where it can, else Spark."""


def as_asked(text: object) -> AskedCommitter:
    """The committer that a ledger's description names; "auto" where it names none."""
    return "delta-rs" if text == "delta-rs" else "spark" if text == "spark" else "auto"


@dataclass(frozen=True, slots=True)
class Refused:
    """Nobody writes it: the reason, and what to do instead."""

    reason: str
    way_on: str


Way: TypeAlias = Committer | Refused

RS: Final = Committer.DELTA_RS
SPARK: Final = Committer.SPARK

_NOT_IN_PATHS: Final = re.compile(r"[\x00-\x1f\x7f:]")
_NAME_BYTES_MAX: Final = 200
"""Of a partition column's name: what is left of a folder's name of 255 bytes is for its value."""

READER_VERSION_MAX: Final = 3
WRITER_VERSION_MAX: Final = 7

_PLAIN: Final = frozenset(
    {"string", "integer", "long", "short", "byte", "boolean", "date", "timestamp", "timestamp_ntz"}
)
"""Types of partition columns whose values delta-rs and Spark spell alike. delta-rs cannot read -0.5 as one, for example."""


@dataclass(frozen=True, slots=True)
class TableFacts:
    """What a table's protocol, settings and columns say of its features."""

    features: frozenset[str]
    settings: Mapping[str, str]
    partitions: Mapping[str, str]
    """The partition columns, each with its type."""
    required: tuple[str, ...] = ()
    """The columns that are NOT NULL."""
    marks: Mapping[str, Mapping[str, Any]] = field(default_factory=dict[str, Mapping[str, Any]])
    """The columns' own metadata, by column."""
    columns: tuple[str, ...] = ()
    reader: int = 1
    writer: int = 2
    respelled: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    unzoned: tuple[str, ...] = ()
    """Some of the files' paths and partition values; see `live_files`. An append touches none, and does not look at them."""

    @classmethod
    def of(cls, table: TableHead, mode: SinkMode = SinkMode.APPEND) -> TableFacts:
        """The facts of a version of a table that rows of this mode ask for."""
        files = table if mode is not SinkMode.APPEND and isinstance(table, DeltaTable) else None
        protocol, metadata, fields = table.protocol(), table.metadata(), table.schema().fields
        types = {f.name: str(getattr(f.type, "type", f.type)) for f in fields}
        return cls(
            frozenset([*(protocol.writer_features or ()), *(protocol.reader_features or ())]),
            metadata.configuration,
            {name: types[name] for name in metadata.partition_columns},
            tuple(f.name for f in fields if not f.nullable),
            {f.name: f.metadata for f in fields if f.metadata},
            tuple(f.name for f in fields),
            protocol.min_reader_version,
            protocol.min_writer_version,
            () if files is None else respelled_paths(files),
            () if files is None else paths_outside(files),
            ()
            if files is None
            else unzoned_values(files, [n for n in metadata.partition_columns if types[n] == "timestamp"]),
        )

    @classmethod
    def of_new(cls, input_: SinkInput, partitions: Iterable[str], settings: Mapping[str, str]) -> TableFacts:
        """The facts of a table that is made for such rows."""
        types = {
            f.name: str(getattr(f.type, "type", f.type))
            for f in Schema.from_arrow(input_.schema.empty_table().schema).fields
        }
        return cls(frozenset(), settings, {name: types[name] for name in partitions}, columns=tuple(types))

    def marked(self, prefix: str) -> tuple[str, ...]:
        """The columns with a key of this beginning in their metadata."""
        return tuple(name for name, keys in self.marks.items() if any(key.startswith(prefix) for key in keys))

    def is_on(self, setting: str) -> bool:
        """Whether a table property is "true"."""
        return self.settings.get(setting, "").lower() == "true"


Find: TypeAlias = Callable[[TableFacts], Iterable[str]]
"""What a table has of a feature, each in a few words; nothing where it does not have it."""


@dataclass(frozen=True, slots=True)
class Feature:
    """One row of the matrix: a feature, and who writes to a table that has it."""

    name: str
    find: Find
    append: Way
    by_key: Way
    """Of an upsert and a fold."""
    note: str = ""
    protocol: frozenset[str] = frozenset()
    """The names under which it stands in a table's protocol."""

    def way(self, mode: SinkMode) -> Way:
        """Who writes rows of this mode."""
        return self.append if mode is SinkMode.APPEND else self.by_key


def _listed(*names: str) -> Find:
    return lambda facts: sorted(facts.features.intersection(names))


def _in_protocol(name: str, names: str, way: Way, note: str = "", *, by_key: Way | None = None) -> Feature:
    """A feature that counts as soon as the table's protocol lists it."""
    listed = names.split()
    return Feature(name, _listed(*listed), way, way if by_key is None else by_key, note, frozenset(listed))


def _marked(prefix: str) -> Find:
    return lambda facts: (f"column {name!r}" for name in facts.marked(prefix))


def _set(setting: str) -> Find:
    return lambda facts: (setting,) if facts.is_on(setting) else ()


def _given(setting: str) -> Find:
    return lambda facts: (setting,) if facts.settings.get(setting) else ()


def _checks(facts: TableFacts) -> Iterable[str]:
    return (key for key in facts.settings if key.startswith("delta.constraints."))


def _odd_partitions(facts: TableFacts) -> Iterable[str]:
    return (f"{name} {kind}" for name, kind in facts.partitions.items() if kind not in _PLAIN)


def _text_types(*, served: bool) -> Find:
    def find(facts: TableFacts) -> Iterable[str]:
        found = {name: str(marks[TEXT_TYPE]) for name, marks in facts.marks.items() if TEXT_TYPE in marks}
        return (f"{name} {kind}" for name, kind in found.items() if served is (characters_max(kind) is not None))

    return find


def characters_max(text_type: str | None) -> int | None:
    """How many characters Spark's type of a text column allows; None: it is no `varchar(n)`."""
    found = re.fullmatch(r"varchar\((\d+)\)", text_type or "")
    return None if found is None else int(found[1])


def _not_in_paths(facts: TableFacts) -> Iterable[str]:
    return (
        repr(name) for name in facts.partitions if _NOT_IN_PATHS.search(name) or len(name.encode()) > _NAME_BYTES_MAX
    )


def _reserved(facts: TableFacts) -> Iterable[str]:
    return (f"column {name!r}" for name in facts.columns if name.startswith("__delta_rs_"))


def _mapping(facts: TableFacts) -> Iterable[str]:
    mode = facts.settings.get("delta.columnMapping.mode", "none")
    return () if mode == "none" else (f"delta.columnMapping.mode={mode}",)


def _identity(facts: TableFacts) -> Iterable[str]:
    return sorted({*facts.features.intersection({"identityColumns"}), *_marked(IDENTITY)(facts)})


def _defaults(facts: TableFacts) -> Iterable[str]:
    return sorted({*facts.features.intersection({"allowColumnDefaults"}), *_marked(DEFAULT)(facts)})


def _newer(facts: TableFacts) -> Iterable[str]:
    if facts.reader > READER_VERSION_MAX or facts.writer > WRITER_VERSION_MAX:
        yield f"reader {facts.reader}, writer {facts.writer}"


def _unknown(facts: TableFacts) -> Iterable[str]:
    return sorted(facts.features - _KNOWN)


_OTHER_TABLE: Final = "use another table"
_APPEND_ONLY: Final = Refused(
    "an upsert or a fold changes rows, which such a table forbids", "append to it, or unset it"
)
_CATALOG: Final = Refused("its catalog takes the commits, and a path reaches no catalog", _OTHER_TABLE)
_FORGETS: Final = Refused("it forgets what was applied: a repeat would be applied again", "unset the property")
_NO_JAR: Final = Refused(
    "each commit must also write the other format, and its converter is not among Delta's jars for this Spark",
    "unset the property",
)
_NO_PATH: Final = Refused(
    "a colon, a control character, or a name so long cannot be in the path of a file that every reader finds",
    "name the column otherwise",
)
NO_ZONE: Final = Refused(
    "they are of the zone that Spark's session had when it wrote them, which the log does not say, and a merge would read "
    "them as UTC",
    "have Spark write these rows again in a session of that zone, with "
    "spark.databricks.delta.write.utcTimestampPartitionValues=true",
)
_PADDED: Final = Refused(
    "Spark pads or checks such text by rules of its own", "change it with ALTER TABLE ... ALTER COLUMN ... TYPE STRING"
)
_TYPES: Final = Refused("this release of Delta does not write it", _OTHER_TABLE)
_UNKNOWN: Final = Refused("it is not known here what a writer has to do for it", _OTHER_TABLE)
_MOVED: Final = Refused("the table is being moved: its writers are sent to another one", "name that table")

FEATURES: Final = (
    Feature("no further feature", lambda _: (), RS, RS),
    Feature(
        "partitions",
        lambda facts: facts.partitions,
        RS,
        RS,
        "an append writes a file for each; a merge whose keys name the partition reads only those partitions",
    ),
    Feature("partitions by a float, a decimal or binary", _odd_partitions, SPARK, SPARK),
    Feature(
        "partitions by a timestamp",
        lambda facts: (name for name, kind in facts.partitions.items() if kind == "timestamp"),
        RS,
        SPARK,
    ),
    Feature("partition columns whose names no path takes", _not_in_paths, _NO_PATH, _NO_PATH),
    Feature("column names that delta-rs uses itself", _reserved, RS, SPARK, "they begin with `__delta_rs_`"),
    Feature(
        "file paths that delta-rs spells otherwise",
        lambda facts: facts.respelled,
        RS,
        SPARK,
        "such as Spark's with letters outside ASCII",
    ),
    Feature("files outside of its folder", lambda facts: facts.outside, RS, SPARK, "of a SHALLOW CLONE"),
    Feature("partition timestamps without a zone", lambda facts: facts.unzoned, RS, NO_ZONE),
    Feature("varchar(n)", _text_types(served=True), RS, RS, "longer text fails its message"),
    Feature("char(n), also nested in a column; nested varchar(n)", _text_types(served=False), _PADDED, _PADDED),
    _in_protocol("liquid clustering", "clustering", SPARK, "OPTIMIZE clusters the rows, not a commit"),
    _in_protocol("deletion vectors", "deletionVectors", RS, by_key=SPARK),
    Feature("column mapping", _mapping, SPARK, SPARK, "", frozenset({"columnMapping"})),
    Feature(
        "NOT NULL",
        lambda facts: (f"column {name!r}" for name in facts.required),
        RS,
        RS,
        "a NULL fails its message",
        frozenset({"invariants"}),
    ),
    Feature("column invariants", _marked("delta.invariants"), SPARK, SPARK, "of old tables"),
    Feature(
        "CHECK constraints",
        _checks,
        RS,
        RS,
        "asked at the commit: a refused row's message is rejected, in a fold its group's; one that divides needs "
        "`committer='spark'`",
        frozenset({"checkConstraints"}),
    ),
    Feature("generated columns", _marked(GENERATED), SPARK, SPARK, "", frozenset({"generatedColumns"})),
    Feature("identity columns", _identity, SPARK, SPARK, "", frozenset({"identityColumns"})),
    Feature("column defaults", _defaults, SPARK, SPARK, "", frozenset({"allowColumnDefaults"})),
    _in_protocol("row tracking", "rowTracking", SPARK),
    _in_protocol("domain metadata", "domainMetadata", SPARK),
    Feature("change data feed", _set("delta.enableChangeDataFeed"), RS, SPARK, "", frozenset({"changeDataFeed"})),
    Feature("delta.appendOnly", _set("delta.appendOnly"), RS, _APPEND_ONLY, "", frozenset({"appendOnly"})),
    _in_protocol("type widening", "typeWidening typeWidening-preview", SPARK),
    _in_protocol(
        "variant columns",
        "variantType variantType-preview variantShredding variantShredding-preview",
        RS,
        "an append leaves them NULL, a merge keeps them",
        by_key=SPARK,
    ),
    _in_protocol("timestamps without zone", "timestampNtz", RS),
    _in_protocol("v2 checkpoints", "v2Checkpoint", RS),
    _in_protocol("in-commit timestamps", "inCommitTimestamp inCommitTimestamp-preview", SPARK),
    _in_protocol("VACUUM's protocol check", "vacuumProtocolCheck", SPARK),
    _in_protocol("checkpoint protection", "checkpointProtection", SPARK),
    _in_protocol("materialized partition columns", "materializePartitionColumns", SPARK),
    _in_protocol("Iceberg compatibility", "icebergCompatV1 icebergCompatV2", SPARK),
    Feature("UniForm", _given("delta.universalFormat.enabledFormats"), _NO_JAR, _NO_JAR),
    _in_protocol(
        "managed or catalog commits",
        "catalogManaged catalogOwned catalogOwned-preview coordinatedCommits-preview managedCommit-preview",
        _CATALOG,
    ),
    Feature(
        "delta.setTransactionRetentionDuration", _given("delta.setTransactionRetentionDuration"), _FORGETS, _FORGETS
    ),
    _in_protocol("collations", "collations collations-preview", _TYPES),
    _in_protocol("geometry and geography", "geospatial geospatial-preview", _TYPES),
    _in_protocol(
        "redirection",
        "redirectReaderWriter-preview redirectWriterOnly-preview redirectReaderWriter redirectWriterOnly",
        _MOVED,
    ),
    Feature("a protocol newer than reader 3, writer 7", _newer, _UNKNOWN, _UNKNOWN),
    Feature("any other feature", _unknown, _UNKNOWN, _UNKNOWN),
)
"""The matrix. A table may have several features: one that is refused decides, then one that needs Spark."""

_KNOWN: Final = frozenset(name for feature in FEATURES for name in feature.protocol)


@dataclass(frozen=True, slots=True)
class FoundFeature:
    """A feature that a table has, and what of it in particular."""

    feature: Feature
    what: tuple[str, ...]

    @property
    def text(self) -> str:
        """The feature as a message names it."""
        return f"{self.feature.name} ({', '.join(self.what)})"


@dataclass(frozen=True, slots=True)
class CommitterChoice:
    """Who is to write: `refused` where it is nobody. `needs_spark` are the features that delta-rs does not write."""

    committer: Committer
    needs_spark: tuple[FoundFeature, ...] = ()
    refused: tuple[FoundFeature, ...] = ()


def features_of(facts: TableFacts) -> tuple[FoundFeature, ...]:
    """The features that a table has, in the order of the matrix."""
    found = ((feature, tuple(feature.find(facts))) for feature in FEATURES)
    return tuple(FoundFeature(feature, what) for feature, what in found if what)


def choose(facts: TableFacts, mode: SinkMode) -> CommitterChoice:
    """Who writes rows of this mode to such a table: delta-rs wherever it can."""
    there = features_of(facts)
    spark = tuple(found for found in there if found.feature.way(mode) is SPARK)
    refused = tuple(found for found in there if isinstance(found.feature.way(mode), Refused))
    return CommitterChoice(SPARK if spark else RS, spark, refused)


def refusal(found: FoundFeature, mode: SinkMode) -> str:
    """What a person is told of a feature that is refused: what the table has, why that does not go, and the way on."""
    way = found.feature.way(mode)
    return f"the table has {found.text}" + (f": {way.reason}; {way.way_on}" if isinstance(way, Refused) else "")


def as_markdown() -> str:
    """The matrix as two tables, for the docs: what is written, by whom; what is refused, and why."""
    written, refused = defaultdict[Sequence[str], list[str]](list), defaultdict[Sequence[str], list[str]](list)
    for feature in FEATURES:
        if isinstance(feature.by_key, Refused):
            what = "all" if feature.append is feature.by_key else "upsert, fold"
            refused[what, f"{feature.by_key.reason}; {feature.by_key.way_on}"].append(feature.name)
        else:
            note = f" ({feature.note})" if feature.note else ""
            written[str(feature.append), str(feature.by_key)].append(f"{feature.name}{note}")
    lines = ["| features of the table | append by | upsert, fold by |", "| --- | --- | --- |"]
    lines += [f"| {'; '.join(names)} | {' | '.join(ways)} |" for ways, names in written.items()]
    lines += ["", "| refused | for | why, and what to do |", "| --- | --- | --- |"]
    lines += [f"| {'; '.join(names)} | {' | '.join(ways)} |" for ways, names in refused.items()]
    return "\n".join(lines) + "\n"
