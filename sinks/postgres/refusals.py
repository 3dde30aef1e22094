"""A table's rules that can refuse rows in the middle of a commit, found before the first batch; and their errors."""

from __future__ import annotations

from typing import Final, LiteralString

import psycopg
from psycopg import sql

from stormproof.core.errors import SinkRefused
from stormproof.core.sink import SinkInput
from stormproof.core.source.postgres_queue.tables import MESSAGE_SCHEMA
from stormproof.sinks.postgres.durable import TREE
from stormproof.sinks.postgres.table import TableName

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
    select i.indexrelid::regclass::text, i.indimmediate, case when i.indisunique and c.plain
        and position('NULLS NOT DISTINCT' in pg_get_indexdef(i.indexrelid)) = 0 then c.columns end
    from tree join pg_index i on i.indrelid = tree.oid cross join lateral (
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
    if state == _LIMIT_EXCEEDED:
        return error.diag.source_function not in _LIMITS_OF_THE_SERVER
    return state[:2] in _ROW_CLASSES or (state == _NO_RIGHT and error.diag.source_function == _CHECKS_A_ROW)
