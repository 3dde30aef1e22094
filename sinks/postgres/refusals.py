"""What the catalog says of a table beside its columns: the rules that can refuse rows in the middle of a commit, and their
errors; collations by which two keys would be one; storages that a crash empties; and the facts that each commit asks for.

A commit goes by the facts that the one before it found, and asks for them by one statement while the rows that it wrote
lock the table. Where the table was changed since, the commit is undone, and begun anew by what is true now.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, LiteralString, NamedTuple

import psycopg
from psycopg import sql

from stormproof.core.base.errors import SinkRefused
from stormproof.core.contract.sink import SinkInput
from stormproof.core.source.postgres_queue.tables import MESSAGE_SCHEMA
from stormproof.sinks.postgres.table import TABLE, TREE, Table, TableName, table_of

VOLATILE: Final = """
    select oid::regclass::text,
           case when relkind = 'f' then 'a foreign table' when relpersistence = 't' then 'temporary'
                when relpersistence = 'u' then 'unlogged' else 'no table (relkind ' || relkind::text || ')' end
    from tree where relkind not in ('r', 'p') or relpersistence <> 'p' order by 1
"""
"""Those of `TREE` whose rows a crash may lose."""
_VOLATILE: Final = (TREE + VOLATILE).replace("{oid}", "%s").encode()


def volatile_relations(connection: psycopg.Connection, oid: int) -> list[tuple[str, str]]:
    """Those of the table and its partitions, at any depth, whose rows a crash may lose: (name, what it is).

    Children by inheritance are left out: rows that are inserted into their parent stay there.
    """
    return [(str(name), str(what)) for name, what in connection.execute(_VOLATILE, (oid,)).fetchall()]


def require_durable(connection: psycopg.Connection, oid: int, where: str) -> None:
    """Refuse a table that keeps some of its rows where a crash loses them, while the guard would say that they are there.

    Where the transaction has written its rows before the call, the answer holds until the transaction ends: each partition
    that got a row is locked against ALTER TABLE by then.

    Raises:
        SinkRefused: names the first such relation.
    """
    require_no_volatile(volatile_relations(connection, oid), where)


def require_no_volatile(found: Sequence[tuple[str, str]], where: str) -> None:
    """The same by what `volatile_relations` found."""
    if found:
        name, what = found[0]
        more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
        raise SinkRefused(
            f"{where}: {name} is {what}{more}: a crash of the server loses its rows, while the sink's own record says that "
            f"they are there. Nothing was written. {_way_on(name, what)}",
            relation=name,
            relations=[relation for relation, _ in found],
        )


def _way_on(name: str, what: str) -> str:
    if what == "unlogged":
        return f"Run: alter table {name} set logged"
    return f"Move its rows into a permanent table, and detach {name}"


_TREE_OF_OID: Final = TREE.replace("{oid}", "%(oid)s::oid")

_CONSTRAINTS: Final = f"""{_TREE_OF_OID}, domain as (
        select t.oid, t.typbasetype from pg_attribute a join pg_type t on t.oid = a.atttypid
        where a.attrelid = %(oid)s and a.attnum > 0 and t.typtype = 'd'
        union
        select t.oid, t.typbasetype from domain d join pg_type t on t.oid = d.typbasetype where t.typtype = 'd'
    )
    select distinct c.conname::text, case c.contype when 'c' then 'CHECK' when 'f' then 'FOREIGN KEY'
           when 'x' then 'EXCLUDE' end, pg_get_constraintdef(c.oid)
    from tree t join pg_constraint c on c.conrelid = t.oid where c.contype in ('c', 'f', 'x')
    union
    select c.conname::text, 'CHECK', pg_get_constraintdef(c.oid)
    from domain d join pg_constraint c on c.contypid = d.oid where c.contype = 'c'
    order by 2, 1
"""

_UNIQUE: Final = """
    select i.indexrelid::regclass::text, pg_get_indexdef(i.indexrelid),
           array(select a.attname::text from unnest(i.indkey[0:i.indnkeyatts - 1]) as k (attnum)
                 join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum)
    from pg_index i where i.indrelid = %(oid)s and i.indisunique order by 1
"""

_TRIGGERS: Final = """
    select t.tgname::text from pg_trigger t
    where t.tgrelid = %(oid)s and not t.tgisinternal and t.tgenabled <> 'D'
      and (t.tgtype & 4 <> 0 or (%(updates)s and t.tgtype & 16 <> 0)) order by 1
"""

# Of `TREE`: may it drop a row, change what is inserted, change other rows of the table. Only a row's own trigger can drop
# it, before the row is written: by returning NULL. Those AFTER the insert may update the row that was inserted. What may
# change other rows are triggers AFTER an update, and what updates those that refer to a row.
TRIGGERS: Final = """
    select distinct t.tgname::text,
           not t.tgisinternal and t.tgtype & 3 = 3 and (t.tgtype & 4 <> 0 or (%(updates)s and t.tgtype & 16 <> 0)) as drops,
           not t.tgisinternal and t.tgtype & 4 <> 0 as changes, t.tgtype & 18 = 16 as reaches
    from tree join pg_trigger t on t.tgrelid = tree.oid
    where (not t.tgisinternal or t.tgfoid in ('"RI_FKey_cascade_upd"'::regproc, '"RI_FKey_setnull_upd"'::regproc,
          '"RI_FKey_setdefault_upd"'::regproc) and t.tgconstrrelid in (select oid from tree))
      and t.tgenabled in ('A', case current_setting('session_replication_role') when 'replica' then 'R' else 'O' end)
    order by 1
"""

_REFERS_TO_ITSELF: Final = f"""{_TREE_OF_OID}
    select exists (
        select from tree join pg_constraint c on c.conrelid = tree.oid and c.contype = 'f'
        where c.confrelid in (select oid from tree union select relid::oid from pg_partition_ancestors(%(oid)s))
    )
"""

# Of `TREE`. A unique index on the key's columns, or on these and more, excludes no row of another key. Of one in which equal
# columns are equal rows, the columns are told; elsewhere (expressions, exclusion, NULLS NOT DISTINCT, ...) NULL.
RIVALS: Final = """
    select x.relname::text, i.indimmediate, case when i.indisunique and not i.indisexclusion and c.plain
        and position('NULLS NOT DISTINCT' in pg_get_indexdef(i.indexrelid)) = 0 then c.columns end
    from tree join pg_index i on i.indrelid = tree.oid join pg_class x on x.oid = i.indexrelid cross join lateral (
        select array_agg(a.attname::text) as columns,
               bool_and(a.attname is not null and a.attcollation = k.coll and o.opcdefault) as plain
        from unnest(i.indkey[0:i.indnkeyatts - 1], i.indclass[0:i.indnkeyatts - 1], i.indcollation[0:i.indnkeyatts - 1])
             as k (attnum, opclass, coll)
        join pg_opclass o on o.oid = k.opclass
        left join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
    ) as c
    where (i.indisunique or i.indisexclusion)
      and not (%(updates)s and i.indisunique and %(keys)s::text[] <@ c.columns) order by 1
"""

_ONLY_CHECKS: Final = """
    select array(select pg_get_expr(c.conbin, c.conrelid) from pg_constraint c
                 where c.conrelid = t.oid and c.contype = 'c' order by 1),
           array(select distinct a.attname::text from pg_constraint c cross join unnest(c.conkey) as k (attnum)
                 join pg_attribute a on a.attrelid = t.oid and a.attnum = k.attnum
                 where c.conrelid = t.oid and c.contype = 'c')
    from pg_class t where t.oid = %(oid)s and t.relkind = 'r' and not row_security_active(t.oid)
      and not exists (select from pg_constraint c where c.contype = 'f' and t.oid in (c.conrelid, c.confrelid))
      and not exists (select from pg_trigger g where g.tgrelid = t.oid and not g.tgisinternal)
      and not exists (select from pg_attribute a where a.attrelid = t.oid and a.attgenerated <> '')
      and not exists (select from pg_index i where i.indrelid = t.oid and i.indexprs is not null)
"""

_RULES: Final = """
    select rulename::text from pg_rewrite
    where ev_class = %(oid)s and ev_enabled <> 'D' and (ev_type = '3' or (%(updates)s and ev_type = '2')) order by 1
"""

_ROW_CLASSES: Final = ("22", "23", "44", "P0")
"""SQLSTATE classes of errors about a row: its value, a constraint, a view's check option, a function's RAISE."""

_NO_RIGHT: Final = "42501"
_CHECKS_A_ROW: Final = "ExecWithCheckOptions"
"""The function of the server that asks a policy of row-level security about a new row."""

_SEQUENCE_ENDED: Final = "2200H"
_LIMIT_EXCEEDED: Final = "54000"
_LIMITS_OF_THE_SERVER: Final = (
    "GetNewTransactionId",
    "GetNewMultiXactId",
    "CommandCounterIncrement",
    "PreCommit_Notify",
)
"""The functions of the server whose errors of that SQLSTATE lie in no row: no numbers are left, or a queue is full."""


def what_can_refuse(connection: psycopg.Connection, oid: int, input_: SinkInput) -> list[str]:
    """The table's rules that may refuse rows only at a commit, each in a few words.

    Types, NOT NULL and lengths are not among them: the writer checks those row by row.
    """
    if _is_queue(connection, oid):
        return []  # its rules are ours, and refuse all rows or none
    known = {"oid": oid, "updates": input_.is_by_key}
    found = [f"{kind} {name}: {text}" for name, kind, text in connection.execute(_CONSTRAINTS, known).fetchall()]
    for name, text, columns in connection.execute(_UNIQUE, known).fetchall():
        if not (input_.is_by_key and set(columns) == set(input_.keys)):
            found.append(f"UNIQUE {name}: {text}")
    found += [f"trigger {name}" for (name,) in connection.execute(_TRIGGERS, known).fetchall()]
    if has_row_security(connection, oid):
        found.append("row-level security")
    return found


def refers_to_itself(connection: psycopg.Connection, oid: int) -> bool:
    """Whether the table has a foreign key to itself, so that a row may be refused for lack of another row of its batch."""
    return connection.execute(_REFERS_TO_ITSELF, {"oid": oid}).fetchone() == (True,)


def only_checks(connection: psycopg.Connection, oid: int) -> tuple[list[LiteralString], list[str]] | None:
    """The table's CHECKs, and the columns that they look at; None where more than these, types and rivals refuses rows."""
    return connection.execute(_ONLY_CHECKS, {"oid": oid}).fetchone()


def has_row_security(connection: psycopg.Connection, oid: int) -> bool:
    """Whether row-level security is active for this role: COPY is refused, and a query sees the policies' rows alone."""
    return connection.execute("select row_security_active(%s::oid)", (oid,)).fetchone() == (True,)


def _is_queue(connection: psycopg.Connection, oid: int) -> bool:
    """Whether the table holds a queue's messages."""
    query = "select from pg_class where oid = %s and relnamespace = to_regnamespace(%s)"
    return connection.execute(query, (oid, MESSAGE_SCHEMA)).fetchone() is not None


def why_uncounted(connection: psycopg.Connection, oid: int) -> str | None:
    """Why a count of the table's rows by this role would prove nothing; None where it sees them all."""
    if has_row_security(connection, oid):
        return "row-level security is active for the role, which sees a part of the rows"
    if _is_queue(connection, oid):
        return "it is a queue's, whose messages are dropped once all of its readers have read them"
    may = connection.execute("select has_table_privilege(%s::oid, 'select')", (oid,)).fetchone()
    return None if may == (True,) else "the role may not SELECT from the table"


def is_empty(connection: psycopg.Connection, oid: int, name: TableName) -> bool:
    """Whether the table is certain to have no row; False where the role cannot see them all."""
    if why_uncounted(connection, oid) is not None:
        return False
    query = sql.SQL("select not exists (select from {})").format(name.identifier)
    return connection.execute(query).fetchone() == (True,)


def require_writable(connection: psycopg.Connection, oid: int, input_: SinkInput, where: str) -> None:
    """Refuse a table whose rules our statements would bypass.

    Raises:
        SinkRefused: it has rules on INSERT: COPY bypasses them, and an upsert is not allowed with them.
    """
    known = {"oid": oid, "updates": input_.is_by_key}
    rules = [name for (name,) in connection.execute(_RULES, known).fetchall()]
    if rules:
        raise SinkRefused(
            f"{where}: the table has the rule {rules[0]!r}: COPY bypasses rules, and INSERT ... ON CONFLICT is not "
            "allowed with them. Drop it, or make it a trigger",
            rule=rules[0],
        )


def is_of_a_row(error: psycopg.Error) -> bool:
    """Whether a statement failed because of one of its rows, so that the table may take the others.

    42501 is the SQLSTATE of a missing right, and of a row that a policy of row-level security does not admit. The server's
    function tells them apart: the text is in the server's language. 54000 is the SQLSTATE of a row, or of its entry in an
    index, that is too large. ltree calls a text that it does not take a syntax error.
    """
    state = error.sqlstate or ""
    if error.diag.source_file == "ltree_io.c":
        return True
    if state == _SEQUENCE_ENDED:
        return False
    if state == _LIMIT_EXCEEDED:
        return error.diag.source_function not in _LIMITS_OF_THE_SERVER
    return state[:2] in _ROW_CLASSES or (state == _NO_RIGHT and error.diag.source_function == _CHECKS_A_ROW)


_NONDETERMINISTIC: Final = """
    select a.attname::text, c.collname::text from pg_attribute a join pg_collation c on c.oid = a.attcollation
    where a.attrelid = %(oid)s and a.attname = any (%(keys)s) and not c.collisdeterministic
    union
    select a.attname::text, c.collname::text
    from pg_index i
    cross join lateral unnest(i.indkey::int2[], i.indcollation::oid[]) as k (attnum, by_collation)
    join pg_attribute a on a.attrelid = i.indrelid and a.attnum = k.attnum
    join pg_collation c on c.oid = k.by_collation
    where i.indrelid = %(oid)s and i.indisunique and a.attname = any (%(keys)s) and not c.collisdeterministic
    order by 1, 2
"""


def require_deterministic_keys(connection: psycopg.Connection, oid: int, input_: SinkInput, where: str) -> None:
    """Refuse a key column, or a unique index on one, with a nondeterministic collation.

    Such a collation takes different texts for equal, as with upper and lower case. Batches are divided and cut by the texts'
    bytes, so two of their keys would be one row of the table.

    Raises:
        SinkRefused: names the column, the collation, and what to do.
    """
    if not input_.is_by_key:
        return
    found = connection.execute(_NONDETERMINISTIC, {"oid": oid, "keys": [*input_.keys]}).fetchone()
    if found is not None:
        column, collation = found
        raise SinkRefused(
            f"{where}: key column {column!r} has the nondeterministic collation {collation!r}, to which different texts are "
            "one key; batches compare texts by their bytes. Give the column, and unique indexes on it, a deterministic "
            'collation, such as COLLATE "C", and write the key in one form, as in lower case',
            column=column,
            collation=collation,
        )


_OID: Final = "to_regclass(%(name)s::text)::oid"


def _listed(query: str) -> str:
    """The rows of a query as a JSON array of objects, whose values stand in the order of its columns."""
    return f"(select json_agg(row_to_json(listed)) from ({query}) as listed)"


_FACTS: Final = f"""{TREE}
    select {_listed(VOLATILE)}, row_security_active({{oid}}), {_listed(TRIGGERS)}, {_listed(RIVALS)}, t.*
    from ({TABLE}) as t
""".replace("{oid}", _OID)


class Rival(NamedTuple):
    """A constraint by which rows of several keys exclude each other."""

    name: str
    at_once: bool
    """Whether it holds at any moment; one that is deferrable holds at the end of a statement."""
    columns: tuple[str, ...] | None
    """Where rows exclude each other only if they are equal in some columns: these."""


@dataclass(frozen=True, slots=True)
class CatalogFacts:
    """A table as the catalog shows it to this role, at one moment."""

    table: Table
    volatile: tuple[tuple[str, str], ...]
    """The relations that lose rows in a crash; see `durable`."""
    row_security: bool
    """Whether row-level security is active for this role, which COPY does not admit."""
    dropping: tuple[str, ...]
    """The triggers that may drop a row without an error."""
    changing: tuple[str, ...]
    """The triggers that may change what is inserted."""
    reaching: tuple[str, ...]
    """The triggers that, behind an update, may change other rows."""
    rivals: tuple[Rival, ...]
    """The unique and exclusion constraints by which rows of several keys exclude each other."""


def ask_facts(connection: psycopg.Connection, name: TableName, input_: SinkInput) -> psycopg.Cursor[tuple[Any, ...]]:
    """Ask for the facts of the table that has the name now; `facts_of` reads the answer, also behind a pipeline."""
    known = {"name": name.identifier.as_string(connection), "updates": input_.is_by_key, "keys": [*input_.keys]}
    return connection.execute(_FACTS.encode(), known)


def facts_of(asked: psycopg.Cursor[tuple[Any, ...]]) -> CatalogFacts | None:
    """The facts; None where no table has the name."""
    row = asked.fetchone()
    if row is None:
        return None
    volatile, row_security, triggers, rivals, *table = row
    rules = [tuple(one.values()) for one in triggers or ()]
    dropping, changing, reaching = (
        tuple(dict.fromkeys(str(rule[0]) for rule in rules if rule[what])) for what in (1, 2, 3)
    )
    return CatalogFacts(
        table_of(table),
        tuple((str(name), str(what)) for name, what in map(dict.values, volatile or ())),
        bool(row_security),
        dropping,
        changing,
        reaching,
        tuple(
            Rival(str(name), bool(at_once), None if columns is None else tuple(columns))
            for name, at_once, columns in map(dict.values, rivals or ())
        ),
    )


@contextmanager
def no_message_to_blame(facts: CatalogFacts, columns: Sequence[str], where: str) -> Generator[None]:
    """Refuse all rows where one is refused for what the table itself put into it: no message can be otherwise.

    Raises:
        SinkRefused: a value of the table's own, such as a sequence's, is there already, or has no partition.
    """
    try:
        yield
    except (psycopg.errors.UniqueViolation, psycopg.errors.CheckViolation) as error:
        name = error.diag.constraint_name
        own: Sequence[str | None] | None
        if isinstance(error, psycopg.errors.UniqueViolation):
            own = next((rival.columns for rival in facts.rivals if rival.name == name), None)
            way_on = "A sequence that is behind its table, as after a restore, is moved on by setval"
        else:  # a partition that is missing has no name
            own = facts.table.partitioned_by if name is None else None
            way_on = "Make the partition"
        if not own or facts.changing or facts.dropping or not {None, *columns}.isdisjoint(own):
            raise
        raise SinkRefused(
            f"{where}: {error.diag.message_primary} ({error.diag.message_detail}), and the stream has no column of it: the "
            f"value is the table's own. {way_on}",
            constraint=name,
            sqlstate=error.sqlstate,
        ) from None


@dataclass(frozen=True, slots=True)
class Moved:
    """How many rows were sent to the table without an error, how many of them it took, superseded ones among them, how many
    keys it had not, and by how much the sum of its rows' hashes is more.
    """

    sent: int
    taken: int
    superseded: int
    inserted: int
    change: int = 0

    @property
    def dropped(self) -> int:
        """How many its triggers dropped."""
        return self.sent - self.taken
