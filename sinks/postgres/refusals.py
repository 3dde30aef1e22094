"""Which of a table's rules can refuse a row in the middle of a commit, said before the first batch; and how one is told."""

from __future__ import annotations

from typing import Final

import psycopg

from stormproof.core.errors import SinkRefused
from stormproof.core.sink import SinkInput

_CONSTRAINTS: Final = """
    with recursive tree as (
        select %(oid)s::oid as oid
        union all
        select i.inhrelid from tree t join pg_inherits i on i.inhparent = t.oid
        join pg_class p on p.oid = t.oid where p.relkind = 'p'
    )
    select distinct c.conname::text, case c.contype when 'c' then 'CHECK' when 'f' then 'FOREIGN KEY'
           when 'x' then 'EXCLUDE' end, pg_get_constraintdef(c.oid)
    from tree t join pg_constraint c on c.conrelid = t.oid where c.contype in ('c', 'f', 'x')
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

_RULES: Final = """
    select rulename::text from pg_rewrite
    where ev_class = %(oid)s and ev_enabled <> 'D' and (ev_type = '3' or (%(updates)s and ev_type = '2')) order by 1
"""

_ROW_CLASSES: Final = ("22", "23", "44", "P0")
"""A value, a constraint, a view's check option, a function's RAISE: what a row can be refused for."""


def what_can_refuse(connection: psycopg.Connection, oid: int, input_: SinkInput) -> list[str]:
    """The table's rules that may refuse rows only when they are committed, each in a few words.

    What the writer checks row by row is none of these: types, NOT NULL, lengths.
    """
    known = {"oid": oid, "updates": input_.is_by_key}
    found = [f"{kind} {name}: {text}" for name, kind, text in connection.execute(_CONSTRAINTS, known).fetchall()]
    for name, text, columns in connection.execute(_UNIQUE, known).fetchall():
        if not (input_.is_by_key and set(columns) == set(input_.keys)):
            found.append(f"UNIQUE {name}: {text}")
    found += [f"trigger {name}" for (name,) in connection.execute(_TRIGGERS, known).fetchall()]
    row = connection.execute("select row_security_active(%(oid)s::oid)", known).fetchone()
    if row is not None and row[0]:
        found.append("row-level security")
    return found


def require_writable(connection: psycopg.Connection, oid: int, input_: SinkInput, where: str) -> None:
    """Refuse a table whose rules would be passed over, or let no statement of ours through.

    Raises:
        SinkRefused: it has rules on INSERT (COPY does not run them, and an upsert is not allowed with them), or row-level
            security that is active for this role, with which COPY is not allowed.
    """
    known = {"oid": oid, "updates": input_.is_by_key}
    rules = [name for (name,) in connection.execute(_RULES, known).fetchall()]
    if rules:
        raise SinkRefused(
            f"{where}: the table has the rule {rules[0]!r}: COPY passes rules over, and INSERT ... ON CONFLICT is not "
            "allowed with them. Drop it, or make it a trigger",
            rule=rules[0],
        )
    row = connection.execute("select row_security_active(%(oid)s::oid)", known).fetchone()
    if row is not None and row[0] and not input_.is_by_key:
        raise SinkRefused(
            f"{where}: row-level security is active for this role, and COPY is not allowed with it. Use a role that "
            "bypasses it (ALTER ROLE ... BYPASSRLS)"
        )


def is_of_a_row(error: psycopg.Error) -> bool:
    """Whether a statement was refused for a row of it, so that its other rows may be taken.

    42501 is row-level security, too: where it is a missing grant, every row is refused, which ends at the limit.
    """
    state = error.sqlstate or ""
    return state[:2] in _ROW_CLASSES or (state == "42501" and "row-level security" in str(error))
