"""What a sink's own arguments say becomes of its rows: `mode`, `key`, `order_by`, `delete_when`, `keep`, `lineage`; and of
columns and values that the table cannot hold: `schema_contract`.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final, Self, TypeAlias

import pyarrow as pa

from stormproof.core.base.arguments import shown
from stormproof.core.base.errors import SinkRefused, TopologyError
from stormproof.core.contract.fold import AnyFold, ByOrder, Fold, SetTruncated, SetUnion
from stormproof.core.contract.schema import require_key
from stormproof.core.contract.sink import EVERY_FOLD, EVERY_MODE, Lineage, SinkInput, SinkMode
from stormproof.core.graph.aggregation import has_extremes, has_sets
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import Sink
from stormproof.sinks.rows.by_key import has_order


class SchemaContract(StrEnum):
    """What becomes of a column, or of a value, that the table cannot hold."""

    FREEZE = "freeze"
    """The table stays as it is. A column that it lacks is refused, and a value that does not fit fails its message."""
    EVOLVE = "evolve"
    """Columns are added to the table, and widened, with the first batch that has them; values are treated as by `freeze`."""
    DISCARD_VALUE = "discard_value"
    """A value that its column cannot hold is NULL in the table, and counted; columns are treated as by `freeze`."""
    DISCARD_ROW = "discard_row"
    """A row with such a value rejects its message at this sink; columns are treated as by `freeze`."""

    @classmethod
    def given(cls, where: str, contract: SchemaContract | str) -> SchemaContract:
        """The contract that a sink's argument names.

        Raises:
            TopologyError: it names none, or one that is not served.
        """
        try:
            return cls(contract)
        except ValueError:
            known = ", ".join(repr(kind.value) for kind in cls)
            raise TopologyError(f"{where}: schema_contract={shown(contract)} is none of {known}") from None


BY_DELTA_RS: Final = (SchemaContract.EVOLVE, SchemaContract.DISCARD_ROW)
"""The contracts that a Delta table has only where delta-rs commits to it."""


@dataclass(frozen=True, slots=True)
class SchemaChange:
    """One change of a table's schema: a column that is added (`was` None), or widened from the type `was` to `becomes`."""

    column: str
    was: str | None
    becomes: str

    def __str__(self) -> str:
        if self.was is None:
            return f"added column {self.column!r} {self.becomes}"
        return f"widened column {self.column!r} from {self.was} to {self.becomes}"


Columns: TypeAlias = str | Sequence[str]
"""One column's name, or several."""

ANY: Final = "any"
"""The `order_by` of an upsert whose rows have no order. A column of that name is given as a list: `order_by=["any"]`."""


@dataclass(frozen=True, slots=True)
class RowRule:
    """What a sink was told to do with its rows. `mode` None: what the stream says, a fold or an append."""

    mode: SinkMode | None = None
    key: tuple[str, ...] = ()
    order_by: tuple[str, ...] = ()
    delete_when: str | None = None
    keep: tuple[str, ...] = ()
    lineage: Lineage | None = None

    @classmethod
    def given(
        cls,
        where: str,
        mode: SinkMode | str | None,
        key: Columns | None,
        order_by: Columns | None,
        delete_when: str | None,
        keep: Columns | None,
        lineage: Lineage | bool = False,
    ) -> RowRule:
        """Check a sink's arguments.

        Raises:
            TopologyError: a mode is unknown, an argument is missing or of the wrong kind, or stands beside a mode that has
                no use for it.
        """
        if mode is not None and mode not in [*SinkMode]:
            modes = ", ".join(repr(m.value) for m in SinkMode)
            raise TopologyError(f"{where}: mode={shown(mode)} is none; use {modes}, or leave it out")
        mode = None if mode is None else SinkMode(mode)
        stored = given_lineage(where, lineage)
        given = {"key": key, "order_by": order_by, "delete_when": delete_when, "keep": keep}
        if mode is not SinkMode.UPSERT:
            for name, value in given.items():
                if value is not None:
                    how = "without a mode" if mode is None else f"with mode={mode.value!r}"
                    raise TopologyError(f"{where}: {name} {how}: only mode='upsert' takes it", argument=name)
            return cls(mode, lineage=stored)
        if key is None:
            raise TopologyError(f"{where}: an upsert needs key=, the column or columns that name a row: key='id'")
        if order_by is None:
            raise TopologyError(
                f"{where}: an upsert needs order_by=, the column that tells which of two rows of a key is later, such as a "
                f"version or a time: order_by='updated_at'. Or order_by={ANY!r}, if any of a batch's rows will do, and "
                "a later batch may always replace an earlier one's: then a message that comes late takes a row back"
            )
        if delete_when is not None and (not isinstance(delete_when, str) or not delete_when):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise TopologyError(f"{where}: delete_when={shown(delete_when)} is no column's name; name a boolean column")
        return cls(
            mode,
            column_names(where, "key", key),
            () if order_by == ANY else column_names(where, "order_by", order_by),
            delete_when,
            () if keep is None else column_names(where, "keep", keep),
            stored,
        )

    def applied(self, rows: SinkInput, where: str) -> SinkInput:
        """What becomes of a stream's rows.

        Raises:
            TopologyError: the stream is a persistent aggregate, and the mode is no fold; or the other way round; or they
                cannot have such lineage columns.
        """
        return with_lineage(self._by_mode(rows, where), self.lineage, where)

    def _by_mode(self, rows: SinkInput, where: str) -> SinkInput:
        if self.mode is None or self.mode is rows.mode:
            return rows
        if rows.mode is SinkMode.FOLD:
            raise TopologyError(
                f"{where}: mode={self.mode.value!r} behind a persistent aggregate, which folds its results into what the "
                "sink holds; leave the mode out, or use .agg(...) for the groups of one batch"
            )
        if self.mode is SinkMode.FOLD:
            raise TopologyError(
                f"{where}: mode='fold' takes the results of a persistent aggregate; write "
                ".group_by(...).persistent_aggregate(n=count()) before it"
            )
        return SinkInput.for_upsert(rows.schema, self.key, self.order_by, delete_when=self.delete_when, keep=self.keep)


class TableSink(Sink):
    """A sink whose arguments say what becomes of its rows; it serves every mode and fold."""

    _name: str
    _rule: RowRule
    _contract: SchemaContract

    @property
    def name(self) -> str:
        """Unique within a topology."""
        return self._name

    @property
    def modes(self) -> frozenset[SinkMode]:
        """All."""
        return EVERY_MODE

    @property
    def fold_kinds(self) -> frozenset[type[AnyFold]]:
        """All."""
        return EVERY_FOLD

    @property
    def rejects_misfits(self) -> bool:
        """By `schema_contract`."""
        return self._contract is SchemaContract.DISCARD_ROW

    @property
    def evolves(self) -> bool:
        """By `schema_contract`."""
        return self._contract is SchemaContract.EVOLVE

    def placed(self, database: Database, staging: str) -> Self:
        """This sink: it needs no database, and has a staging folder of its own."""
        return self

    def input_of(self, rows: SinkInput) -> SinkInput:
        """By `mode`."""
        return self._rule.applied(rows, f"sink {self._name!r}")


def check_upsert_input(input_: SinkInput, where: str) -> None:
    """Refuse an upsert that no sink can serve.

    Raises:
        TopologyError: a column is unknown or stands in two places, a key is of a type that has no one equality, a column of
            `order_by` is of a type without one order, the delete marker is no boolean, or nothing is left to write.
    """
    if input_.mode is not SinkMode.UPSERT:
        return
    schema = input_.schema
    marker = () if input_.delete_when is None else (input_.delete_when,)
    named = {"key": input_.keys, "order_by": input_.order_by, "delete_when": marker, "keep": input_.keep}
    place: dict[str, str] = {}
    for argument, columns in named.items():
        for name in columns:
            if name not in schema.names:
                raise TopologyError(
                    f"{where}: {argument} names {name!r}, and there is no such column; there are {', '.join(schema.names)}",
                    field=name,
                )
            if name in place:
                again = "twice" if place[name] == argument else f"and so does {place[name]}"
                raise TopologyError(f"{where}: {argument} names {name!r} {again}; name it in one place", field=name)
            place[name] = argument
    if not input_.keys:
        raise TopologyError(f"{where}: an upsert needs at least one key column")
    for name in input_.keys:
        require_key(where, where, name, schema.field(name).type, "the key of an upsert")
    for name in input_.order_by:
        if not has_order(schema.field(name).type):
            raise TopologyError(
                f"{where}: order_by names {name!r}, which is {schema.field(name).type}: its values have no order that every "
                "store shares; use a number, a time or a text",
                field=name,
            )
    if marker and not pa.types.is_boolean(schema.field(marker[0]).type):
        raise TopologyError(
            f"{where}: delete_when names {marker[0]!r}, which is {schema.field(marker[0]).type}; a delete marker is a "
            "boolean column, true where the key is deleted",
            field=marker[0],
        )


def column_names(where: str, argument: str, value: Columns) -> tuple[str, ...]:
    """The columns that a sink's argument names, at least one.

    Raises:
        TopologyError: it names none, or one of them twice.
    """
    names = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, (list, tuple)) else ()
    if not names or not all(isinstance(name, str) and name for name in names):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TopologyError(
            f"{where}: {argument}={shown(value)} names no columns; give a name, or a list of names", argument=argument
        )
    twice = [name for place, name in enumerate(names) if name in names[:place]]
    if twice:
        raise TopologyError(
            f"{where}: {argument}={shown(value)} names {twice[0]!r} twice; leave one of the two out", argument=argument
        )
    return names


def given_lineage(where: str, lineage: Lineage | bool) -> Lineage | None:
    """Check a sink's argument.

    Raises:
        TopologyError: it is neither, or names no column, one that is no name, or one name twice.
    """
    if isinstance(lineage, bool):
        return Lineage() if lineage else None
    if not isinstance(lineage, Lineage):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TopologyError(
            f"{where}: lineage={shown(lineage)}: use True, or Lineage(txid='_txid', message='_message_id')",
            argument="lineage",
        )
    names = [name for name in (lineage.txid, lineage.message) if name is not None]
    wrong = [name for name in names if not isinstance(name, str) or not name]  # pyright: ignore[reportUnnecessaryIsInstance]
    if wrong or len({name.lower() for name in names}) < len(names) or not names:
        what = f"{shown(wrong[0])} is no column's name" if wrong else "name one or two columns, each by its own name"
        raise TopologyError(f"{where}: lineage: {what}", argument="lineage")
    return lineage


def with_lineage(rows: SinkInput, lineage: Lineage | None, where: str) -> SinkInput:
    """What becomes of rows that are stored with these columns.

    Raises:
        TopologyError: the rows have a column of such a name, an upsert names one, or the rows of a fold are to name their
            message.
    """
    if lineage is None:
        return rows
    added = lineage.columns
    there = {name.lower(): name for name in rows.schema.names}
    same = [there[name.lower()] for name in added.names if name.lower() in there]
    if same:
        raise TopologyError(
            f"{where}: the rows have a column {same[0]!r} of their own: name the lineage columns otherwise, with "
            "lineage=Lineage(txid=..., message=...)",
            field=same[0],
        )
    marker = [] if rows.delete_when is None else [rows.delete_when]
    for name in (*rows.keys, *rows.order_by, *marker, *rows.keep):
        if name in added.names:
            raise TopologyError(
                f"{where}: {name!r} is a lineage column, which says who wrote a row and nothing of the row: it can be no "
                "key, order, delete marker or kept column. Name a column of the rows",
                field=name,
            )
    folds = dict(rows.folds)
    if rows.mode is SinkMode.FOLD:
        if lineage.message is not None:
            raise TopologyError(
                f"{where}: a row of a fold is made of many messages, so column {lineage.message!r} can name none; store the "
                "txid of its last change alone, with lineage=Lineage(message=None)",
                field=lineage.message,
            )
        folds.update(dict.fromkeys(added.names, Fold.MAX))  # txids only rise: the greatest is the last change's
    return replace(rows, schema=pa.schema([*rows.schema, *added]), folds=folds, lineage=lineage)


def require_lineage_takes_null(input_: SinkInput, not_null: Collection[str], where: str) -> None:
    """Refuse a table whose column for messages' ids takes no NULL: rows of several messages have none.

    Raises:
        SinkRefused: names the column.
    """
    if input_.lineage is not None and input_.lineage.message in not_null:
        raise SinkRefused(
            f"{where}: the table's column {input_.lineage.message!r} is NOT NULL, and a row that no single message made has "
            "no message id. Drop the column's NOT NULL, or store the txid alone, with lineage=Lineage(message=None)",
            column=input_.lineage.message,
        )


def check_fold_input(input_: SinkInput, where: str) -> None:
    """Refuse a fold that a sink cannot serve.

    Raises:
        TopologyError: keys are missing or of a type that has no one equality (floats, nested), a column is neither key
            nor fold, is folded by a user's function, or its type has no sum, least or greatest value.
    """
    names = input_.schema.names
    unknown = [n for n in (*input_.keys, *input_.folds) if n not in names]
    if unknown:
        raise TopologyError(f"{where}: no column {', '.join(map(repr, unknown))}; there are {', '.join(names)}")
    if input_.mode is not SinkMode.FOLD:
        return
    if not input_.keys:
        raise TopologyError(f"{where}: a fold needs at least one key column")
    idle = [n for n in names if n not in input_.keys and n not in input_.folds]
    both = [n for n in input_.keys if n in input_.folds]
    if idle or both:
        raise TopologyError(f"{where}: column {(idle + both)[0]!r} of a fold must be either a key or folded")
    for name in input_.keys:
        kind = input_.schema.field(name).type
        if pa.types.is_floating(kind) or pa.types.is_nested(kind):
            raise TopologyError(
                f"{where}: key {name!r} is {kind}, whose values do not compare alike everywhere; use another type"
            )
    for name, fold in input_.folds.items():
        kind = input_.schema.field(name).type
        if fold is Fold.OWN:
            raise TopologyError(
                f"{where}: column {name!r} is folded by a function of yours, which this sink cannot call: it takes sums, "
                "minima and maxima; keep the result in a state, persistent_aggregate(..., state=...)",
                field=name,
            )
        if isinstance(fold, (SetUnion, SetTruncated)):
            _check_set(name, fold, input_, where)
        elif isinstance(fold, ByOrder):
            _check_by_order(name, fold, input_, where)
        elif not _can_fold(kind, fold):
            raise TopologyError(f"{where}: column {name!r} is {kind}, which has no {fold}", field=name)


def _check_by_order(name: str, fold: ByOrder, input_: SinkInput, where: str) -> None:
    """Refuse a first or last whose columns are not folded as one."""
    for other in (*fold.compared, name):
        if input_.folds.get(other) != fold or name not in fold.compared:
            raise TopologyError(
                f"{where}: column {name!r} is folded as the {fold}: each of these columns must be folded so, and be named "
                "in the order",
                field=other,
            )
        kind = input_.schema.field(other).type
        if not has_extremes(kind):
            raise TopologyError(f"{where}: column {other!r} is {kind}, which has no {fold.end}", field=other)


def _check_set(name: str, fold: SetUnion | SetTruncated, input_: SinkInput, where: str) -> None:
    """Refuse a set of values that stores sort otherwise, and a mark without its set."""
    kind = input_.schema.field(name).type
    if fold.at_most < 1:
        raise TopologyError(f"{where}: column {name!r}: a set of at most {fold.at_most} values holds none", field=name)
    if isinstance(fold, SetUnion):
        if not pa.types.is_list(kind) or not has_sets(kind.value_type):
            raise TopologyError(
                f"{where}: column {name!r} is {kind}, which is no set that every store sorts alike", field=name
            )
    elif not pa.types.is_boolean(kind) or input_.folds.get(fold.of) != SetUnion(fold.at_most):
        raise TopologyError(
            f"{where}: column {name!r} of type {kind} is folded as the {fold}: it must be boolean, and {fold.of!r} a set of "
            f"at most {fold.at_most} values",
            field=name,
        )


def _can_fold(kind: pa.DataType, fold: Fold) -> bool:
    if fold is Fold.SUM:
        return bool(pa.types.is_signed_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))
    return has_extremes(kind)
