"""Alembic's entry point: runs the revisions on the connection that `stormproof.migrations` passes, or prints their SQL."""

from __future__ import annotations

from alembic import context

SCHEMA = "stormproof"


def run() -> None:
    """Run the revisions; print their SQL where Alembic is offline."""
    connection = context.config.attributes.get("connection")
    if connection is None:
        # This style keeps "%" as it is: the driver's own style would print each twice, also inside functions.
        style = {"paramstyle": "named"}
        context.configure(
            dialect_name="postgresql", dialect_opts=style, version_table_schema=SCHEMA, literal_binds=True
        )
    else:
        context.configure(connection=connection, version_table_schema=SCHEMA)
    with context.begin_transaction():
        context.run_migrations()


run()
