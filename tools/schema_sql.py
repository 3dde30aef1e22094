"""Write `migrations/tables.sql` from the tables that the code declares. usage: .venv/bin/python tools/schema_sql.py"""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql
from sqlalchemy.schema import CreateIndex, CreateTable, DDLElement, SetColumnComment, SetTableComment

from stormproof.core.pending.tables import metadata as pending
from stormproof.core.source.files.entries import metadata as files
from stormproof.core.source.postgres_queue.tables import metadata as queues
from stormproof.trident.ledger import control, handed_in
from stormproof.trident.ledger.tables import metadata as ledger

DECLARED: Final = (ledger, queues, files, pending)
assert all(module.__dict__ for module in (control, handed_in))  # they add their tables to the ledger's
PATH: Final = Path(__file__).parents[1] / "migrations" / "tables.sql"
HEAD: Final = """\
-- The tables of ledger, queues and pending messages.
-- Made from the code's declarations by tools/schema_sql.py: change those, and make this file anew.
"""
# Names of constraints and such stand in the statements as they are, and no driver doubles a "%".
_DIALECT: Final = postgresql.dialect(paramstyle="named")  # type: ignore[no-untyped-call]


def text() -> str:
    """The file."""
    tables = [table for metadata in DECLARED for table in metadata.sorted_tables]
    return HEAD + "".join("\n" + "".join(f"{one};\n" for one in _statements(table)) for table in tables)


def _statements(table: sa.Table) -> Generator[str]:
    """What makes a table, with its indexes and comments."""
    indexes = sorted(table.indexes, key=lambda index: str(index.name))
    statements: list[DDLElement] = [CreateTable(table), *map(CreateIndex, indexes), SetTableComment(table)]
    if "fillfactor" in table.info:
        statements.insert(1, sa.DDL(f"ALTER TABLE {table.fullname} SET (fillfactor = {table.info['fillfactor']})"))
    statements += [SetColumnComment(column) for column in table.columns if column.comment]
    for statement in statements:
        lines = str(statement.compile(dialect=_DIALECT)).strip().splitlines()
        yield "\n".join(line.rstrip().replace("\t", "  ") for line in lines if line.strip())


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
