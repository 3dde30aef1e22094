"""The checks of `doctor` in the ledger's database: the role's rights, writes, durability, tables, queues."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import psycopg

from stormproof.core.errors import CannotTell, MissingRight, PositionMismatch, SettingsError, StormproofError
from stormproof.core.postgres.database import connect
from stormproof.core.postgres.rights import explained
from stormproof.core.postgres.role import RoleKind
from stormproof.core.settings import Settings
from stormproof.core.source.postgres_queue.numbering import SERVER_SQL, TIMELINE_SQL
from stormproof.sinks.preview import TableAction
from stormproof.sinks.protocol import SinkIdentity, warning_of
from stormproof.trident.audit.inspect import described_sink
from stormproof.trident.cli.stores import opened
from stormproof.trident.grants import lacking

SHOWN_MAX = 5


@contextmanager
def _asked(settings: Settings) -> Generator[psycopg.Connection]:
    database = settings.resolve_database()
    with connect(database, application_name="stormproof doctor", autocommit=True) as connection:
        try:
            yield connection
        except psycopg.Error as error:
            raise explained(error, database, "the ledger") or error from error


def _is_made(connection: psycopg.Connection) -> bool:
    # From the catalogue: `to_regclass` refuses a role that may not use the schema.
    row = connection.execute(
        "select exists (select from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname = 'stormproof' and c.relname = 'queue')"
    ).fetchone()
    return row == (True,)


def rights(settings: Settings, kind: RoleKind) -> str:
    """Check the role's rights; if there is no schema yet, its right to create one.

    Raises:
        MissingRight: it lacks something.
    """
    with _asked(settings) as connection:
        (role,) = connection.execute("select current_user::text").fetchone() or ("",)
        if not _is_made(connection):
            may = connection.execute("select has_database_privilege(current_database(), 'CREATE')").fetchone()
            if may != (True,):
                raise MissingRight(
                    f"role {role} has no right to CREATE on this database, so it cannot make the schema: a role that may "
                    "has to run stormproof ledger migrate first"
                )
            return f"role {role} may make the schema"
        missing = lacking(connection, kind)
        if missing:
            more = f" and {len(missing) - SHOWN_MAX} more" if len(missing) > SHOWN_MAX else ""
            raise MissingRight(f"role {role} lacks {', '.join(missing[:SHOWN_MAX])}{more}", lacking=list(missing))
        strange = _others_queues(connection) if kind is RoleKind.DRIVER else []
        if strange:
            raise MissingRight(
                f"role {role} does not own the queues {', '.join(strange)}: it cannot make partitions there, nor drop what "
                "everybody has read. As their owner give it each message table and its partitions (ALTER TABLE ... OWNER "
                "TO), or the owner's role (GRANT)"
            )
    return f"role {role} has those of a {kind}"


def _others_queues(connection: psycopg.Connection) -> list[str]:
    rows = connection.execute(
        "select c.relname from pg_class c join pg_namespace n on n.oid = c.relnamespace"
        " where n.nspname = 'stormproof_queue' and c.relkind = 'p' and not pg_has_role(c.relowner, 'USAGE') order by 1"
    )
    return [name for (name,) in rows]


def writes(settings: Settings) -> str:
    """Check that the server takes writes.

    Raises:
        SettingsError: it is a standby, or read-only by a setting.
    """
    with _asked(settings) as connection:
        row = connection.execute("select pg_is_in_recovery(), current_setting('transaction_read_only')").fetchone()
    where = settings.resolve_database().redacted
    if row is not None and row[0]:
        raise SettingsError(f"{where} is a standby: it takes no writes; name the primary")
    if row is not None and row[1] == "on":
        raise SettingsError(
            f"{where} takes no writes: default_transaction_read_only is on; switch it off for this role and database"
        )
    return "taken"


def durability(settings: Settings) -> tuple[str, ...]:
    """The server's settings under which a crash may lose or damage what was committed."""
    with _asked(settings) as connection:
        rows = connection.execute(
            "select name from pg_settings where name in ('fsync', 'full_page_writes') and setting = 'off' order by 1"
        )
        return tuple(f"{name} is off: a crash may lose or damage what was committed" for (name,) in rows)


def temporary(settings: Settings) -> tuple[str, ...]:
    """Whether the role may not make temporary tables in the ledger's database, where Postgres sinks are by default."""
    with _asked(settings) as connection:
        row = connection.execute(
            "select current_user, current_database() where not has_database_privilege(current_database(), 'TEMPORARY')"
        ).fetchone()
    if row is None:
        return ()
    return (f"role {row[0]} lacks TEMPORARY on database {row[1]}: upserts, folds and text that is cast need it",)


def refusing(settings: Settings) -> tuple[str, ...]:
    """What can refuse rows of each topology's tables when they are committed, why a table would be refused, or why that is
    not known.
    """
    with _asked(settings) as connection:
        if not _is_made(connection):
            return ()
    found = list[str]()
    with opened() as stores, stores.audit.snapshot() as snapshot:
        for row in snapshot.topologies():
            for binding in snapshot.sinks(row.incarnation):
                where = f"{row.name}, sink {binding.sink} ({binding.target})"
                try:
                    sink, input_ = described_sink(binding, stores.database)
                    refusals = sink.refusals(input_)
                    seen = sink.preview(SinkIdentity(row.name, row.incarnation, binding.sink), input_, stores.database)
                except CannotTell:
                    continue  # a kind of sink that only the topology's code can open
                except StormproofError as error:
                    found.append(f"{where}: not known: {error}")
                else:
                    found += [f"{where}: {warning_of(refusals)}"] if refusals else []
                    found += (
                        [f"{row.name}: a start would be refused: {seen.why}"]
                        if seen.action is TableAction.REFUSE
                        else []
                    )
    return tuple(found)


def queues(settings: Settings) -> str:
    """Check that the queues are numbered by this server.

    Raises:
        PositionMismatch: some are of another server or timeline, and were not adopted.
    """
    with _asked(settings) as connection:
        if not _is_made(connection):
            return "none yet"
        may = connection.execute(
            "select has_schema_privilege('stormproof', 'USAGE') and has_table_privilege('stormproof.queue', 'SELECT')"
        ).fetchone()
        if may != (True,):
            return "none that this role sees"
        rows = connection.execute(
            f"select queue, server = {SERVER_SQL} and timeline = {TIMELINE_SQL} from stormproof.queue order by 1".encode()
        ).fetchall()
    strange = [queue for queue, is_ours in rows if not is_ours]
    if strange:
        raise PositionMismatch(f"of another server or timeline, and not adopted: {', '.join(strange)}")
    return f"{len(rows)}, all of this server"
