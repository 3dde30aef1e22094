"""Collations of key columns: texts that a batch takes for two keys must not be one key to the table."""

from __future__ import annotations

from typing import Final

import psycopg

from stormproof.core.errors import SinkRefused
from stormproof.core.sink import SinkInput

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
