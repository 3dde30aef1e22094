"""All that a folder and a database hold: whether anything was changed between two looks, and which tables name something."""

from __future__ import annotations

from pathlib import Path
from typing import TypeAlias

from psycopg import sql

from stormproof.core.postgres.database import Database
from support.databases import at

Held: TypeAlias = dict[str, object]

_RELATIONS = """
    select n.nspname::text, c.relname::text, c.relkind::text, c.oid::bigint, coalesce(c.relacl::text, '')
    from pg_class c join pg_namespace n on n.oid = c.relnamespace
    where n.nspname not like 'pg\\_%' and n.nspname <> 'information_schema' order by 1, 2
"""


def everything(folder: Path, database: Database) -> Held:
    """Each file with its size, time and inode; each relation with its columns and rows."""
    held: Held = {}
    for path in sorted(folder.rglob("*")):
        state = path.stat()
        held[str(path.relative_to(folder))] = (state.st_size, state.st_mtime_ns, state.st_ino, state.st_mode)
    with at(database) as connection:
        for schema, name, kind, *told in connection.execute(_RELATIONS).fetchall():
            held[f"{schema}.{name}"] = (kind, *told)
            if kind in ("r", "p"):
                columns = connection.execute(
                    "select attname::text, atttypid, attnotnull from pg_attribute where attrelid = %s order by attnum",
                    (told[0],),
                ).fetchall()
                # With xmin: a row that was updated to what it was before shows, too.
                query = sql.SQL("select xmin::text, t::text from {} t order by 1, 2").format(
                    sql.Identifier(schema, name)
                )
                held[f"{schema}.{name}: rows"] = (columns, connection.execute(query).fetchall())
    return held


def rows_that_name(database: Database, name: str) -> dict[str, int]:
    """Each table of the database that has a row in which the text stands anywhere, with the number of such rows."""
    found = dict[str, int]()
    with at(database) as connection:
        for schema, table, kind, *_ in connection.execute(_RELATIONS).fetchall():
            if kind == "r":
                query = sql.SQL("select count(*) from {} t where strpos(t::text, %s) > 0").format(
                    sql.Identifier(schema, table)
                )
                ((count,),) = connection.execute(query, (name,)).fetchall()
                if count:
                    found[f"{schema}.{table}"] = count
    return found
