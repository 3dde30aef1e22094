"""`doctor`: what a run needs, on this machine, in the database and on each executor; what is missing, and how to get it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, TypeVar
from uuid import uuid4

import psycopg

from stormproof.core.base.clock import SystemClock
from stormproof.core.base.errors import (
    CannotTell,
    Json,
    MissingRight,
    PositionMismatch,
    SettingsError,
    StormproofError,
    UsageError,
)
from stormproof.core.engine.executor_look import PACKAGES
from stormproof.core.engine.executors import SKEW_MAX_S, ExecutorAnswer, ExecutorAnswers, ask_executors, own_answer
from stormproof.core.engine.spark import spark_session
from stormproof.core.engine.spark_lines import spark_line
from stormproof.core.postgres.database import connect
from stormproof.core.postgres.rights import explained
from stormproof.core.postgres.role import RoleKind
from stormproof.core.source.postgres_queue.message_table import SERVER_SQL, TIMELINE_SQL
from stormproof.core.start.preflight import DatabaseProbe, PackageProbe, Probe, marked_places, package_fingerprint
from stormproof.core.start.settings import Settings
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import options_to_send, use_storage
from stormproof.sinks.contract.preview import TableAction
from stormproof.sinks.contract.protocol import SinkIdentity, warning_of
from stormproof.trident.audit.inspect import described_sink
from stormproof.trident.cli.ledger import lacking
from stormproof.trident.cli.options import opened, spark_options
from stormproof.trident.cli.output import Exit, emit, finish, say

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


START_S: Final = 60.0
"""How long `doctor` waits for a first executor; a run waits for `start_timeout_s`."""

ANSWER_S: Final = 180.0
"""How long it waits for answers: an executor unpacks an environment of half a gigabyte before its first one."""


@dataclass(frozen=True, slots=True)
class Check:
    """One check; `advice` says what to do if it failed, or if a warning is due."""

    name: str
    ok: bool
    found: str
    advice: str | None = None


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """The executors' answers beside the driver's own facts."""

    driver: ExecutorAnswer
    cluster: ExecutorAnswers
    spark: str
    master: str

    def __str__(self) -> str:
        asked = len(self.cluster.answers)
        return f"Spark {self.spark} on {self.master}; {asked} of {self.cluster.known} executors have answered"


def ask_cluster(settings: Settings, *, with_database: bool) -> MachineFacts:
    """Start Spark, ask every executor, and stop it.

    Raises:
        StormproofError: Spark, or a worker, does not start.
    """
    session = spark_session(settings)
    try:
        with marked_places([("the staging folder", settings.staging_address)]) as folders:
            probes: list[Probe] = [PackageProbe(package_fingerprint()), *folders]
            if with_database:
                probes.append(DatabaseProbe("the ledger's database", settings.resolve_database()))
            answers = ask_executors(session, probes, SystemClock(), start_s=START_S, answer_s=ANSWER_S)
        return MachineFacts(own_answer(), answers, session.version, str(session.sparkContext.master))
    finally:
        session.stop()


def checks_of(found: MachineFacts) -> Iterator[Check]:
    """A check for each executor, and what else is worth a warning."""
    for answer in found.cluster.answers:
        name = f"executor {answer.host}/{answer.executor}"
        if answer.faults:
            yield Check(name, False, "; ".join(fault.message for fault in answer.faults))
            continue
        packages = ", ".join(f"{package} {version}" for package, version in answer.packages.items())
        seen = f"Python {answer.python} at {answer.executable}; {packages}"
        yield Check(name, True, seen, "; ".join(_notes(found.driver, answer)) or None)
    silent = found.cluster.known - len(found.cluster.answers)
    if silent > 0:
        why = "they are busy with other work, or have just come: ask again"
        yield Check("executors that were not asked", True, str(silent), why)


def _notes(driver: ExecutorAnswer, answer: ExecutorAnswer) -> Iterator[str]:
    for package in PACKAGES:
        mine, theirs = driver.packages.get(package), answer.packages.get(package)
        if theirs != mine:
            yield f"{package} is {theirs} there and {mine} here: install the same version"
    if abs(answer.skew_s) > SKEW_MAX_S:
        way = "ahead of" if answer.skew_s > 0 else "behind"
        yield f"its clock is at least {abs(answer.skew_s):.1f} s {way} the driver's: synchronise both (NTP)"


def reports_of(found: MachineFacts) -> list[dict[str, Json]]:
    """The executors, for machines."""
    return [
        {
            "host": answer.host,
            "executor": answer.executor,
            "python": answer.python,
            "executable": answer.executable,
            "packages": dict(answer.packages),
            "clock_ahead_s": round(answer.skew_s, 3),
            "faults": [fault.message for fault in answer.faults],
        }
        for answer in found.cluster.answers
    ]


POSTGRES_MIN: Final = 140_000
T = TypeVar("T")


def examine(
    *,
    spark: bool,
    cluster: bool,
    conf: Sequence[str] | None,
    kind: RoleKind,
    as_json: bool,
) -> None:
    """Make every check, whatever failed before; end with status 1 if one failed."""
    if cluster and not spark:
        raise UsageError("--cluster asks Spark's executors: leave --no-spark away")
    given = spark_options(conf or ())
    checks = [Check("python", True, f"{sys.version.split()[0]} at {sys.executable}")]
    settings = _looked(
        "settings", lambda: Settings().with_spark(given), _settings_text, "correct what it names", checks
    )
    executors: list[dict[str, Json]] = []
    if settings is not None:
        _looked("java", _java, str, "install Java 17 or 21, or the extra: pip install 'stormproof[java]'", checks)
        _looked("delta jars", lambda: _jars(settings), str, "fetch them: stormproof jars", checks)
        database = _looked("postgres", lambda: _postgres(settings), str, "start it, or name another", checks)
        if database is not None:
            schema = _looked("ledger schema", lambda: _schema(settings), str, None, checks)
            grants = f"as the schema's owner run what this prints: stormproof ledger sql --grants ROLE --for {kind}"
            if schema is not None:
                _looked(f"rights of a {kind}", lambda: rights(settings, kind), str, grants, checks)
            if kind is not RoleKind.AUDITOR:
                grant = "run: GRANT TEMPORARY ON DATABASE ... TO ..."
                _warned("temporary tables", lambda: temporary(settings), "may be made", grant, checks)
                _looked("writes", lambda: writes(settings), str, "name the primary, or let the role write", checks)
            _warned("durability", lambda: durability(settings), "on", "set what is off to on", checks)
            if schema is not None and kind is RoleKind.DRIVER:
                advice = "check in the topology what the table checks"
                _warned("tables", lambda: refusing(settings), "none is known to refuse rows", advice, checks)
            advice = "see what is proven, and go on, with: stormproof queue adopt QUEUE"
            _looked("queues", lambda: queues(settings), str, advice, checks)
        _looked(
            "staging", lambda: _writable(settings.staging_address), str, "make it writable, or set staging_dir", checks
        )
        if spark and all(check.ok for check in checks if check.name in ("java", "delta jars")):
            if cluster:
                executors += _cluster(settings, database is not None, checks)
            else:
                _looked("spark", lambda: _spark(settings), str, "see Spark's own lines above", checks)
    report = {"ok": all(c.ok for c in checks), "checks": checks, **({"executors": executors} if cluster else {})}
    emit(report, as_json=as_json, text=lambda: _text(checks))
    finish(Exit.DONE if all(check.ok for check in checks) else Exit.FAILED)


def _text(checks: list[Check]) -> None:
    for check in checks:
        say(f"{('WARN  ' if check.advice else 'ok    ') if check.ok else 'FAILED'} {check.name}: {check.found}")
        if check.advice is not None:
            say(f"       {check.advice}")


def _looked(
    name: str, look: Callable[[], T], text: Callable[[T], str], advice: str | None, checks: list[Check]
) -> T | None:
    """Add a check of what `look` finds, which is returned; None if it failed."""
    try:
        found = look()
    except (StormproofError, OSError) as error:
        checks.append(Check(name, False, str(error), advice))
        return None
    checks.append(Check(name, True, text(found)))
    return found


def _warned(name: str, look: Callable[[], tuple[str, ...]], well: str, advice: str, checks: list[Check]) -> None:
    """Add a check whose findings are warnings; it fails only if `look` does."""
    found = _looked(name, look, lambda found: "; ".join(found) or well, None, checks)
    if found:
        checks[-1] = replace(checks[-1], advice=advice)


def _settings_text(settings: Settings) -> str:
    return f"home {settings.home.absolute()}, database {'embedded' if settings.uses_embedded else 'named'}"


def _java() -> str:
    from stormproof.core.engine.java import find_java

    return str(find_java().home)


def _jars(settings: Settings) -> str:
    from stormproof.core.engine.delta_jars import delta_jars

    jars = delta_jars(settings.delta_jars_dir)
    return f"{len(jars)} in {jars[0].parent}" if jars else "none needed"


def _postgres(settings: Settings) -> str:
    from stormproof.core.postgres.database import connect

    database = settings.resolve_database()
    with connect(database, application_name="stormproof doctor", autocommit=True) as connection:
        row = connection.execute("show server_version_num").fetchone()
    version = 0 if row is None else int(row[0])
    if version < POSTGRES_MIN:
        raise SettingsError(f"{database.redacted} is version {version // 10_000}; 14 or newer is needed")
    return f"version {version // 10_000} at {database.redacted}"


def _schema(settings: Settings) -> str:
    from stormproof.migrations import state
    from stormproof.trident.ledger.database import ledger_engine

    database = settings.resolve_database()
    engine = ledger_engine(database)
    try:
        found = state(engine)
        if found.current is None:
            return "none yet; it is made at the first use"
        if not found.up_to_date:
            raise SettingsError(f"revision {found.current}, this version needs {found.head}; {found.advice}")
        return f"revision {found.current}"
    finally:
        engine.dispose()


def _writable(folder: str) -> str:
    """Write, sync and remove a file in the folder, as tasks do."""
    files = files_at(folder)
    files.make_folder(folder)
    probe = os.path.join(folder, f"stormproof-doctor-{uuid4().hex[:8]}")
    files.put_new(probe, b"probe")
    files.remove(probe)
    return folder


def _cluster(settings: Settings, reaches_database: bool, checks: list[Check]) -> list[dict[str, Json]]:
    """Start Spark on the settings' master, ask every executor, and add a check for each."""
    spark_line()
    found = _looked("cluster", lambda: ask_cluster(settings, with_database=reaches_database), str, None, checks)
    if found is None:
        return []
    checks += checks_of(found)
    return reports_of(found)


def _spark(settings: Settings) -> str:
    """Start Spark, and have its tasks reach the staging folder."""
    spark_line()  # refuses what is no Spark before it is imported
    from stormproof.core.engine.spark import spark_session

    session = spark_session(settings)
    try:
        staging = settings.staging_address
        options, marker = options_to_send(staging), os.path.join(staging, f"stormproof-doctor-{uuid4().hex[:8]}")

        def reaches(_: int) -> bool:
            if options is not None:
                use_storage(staging, options)
            return files_at(staging).stat(marker) is not None

        files_at(staging).put_new(marker, b"probe")
        try:
            reached = session.sparkContext.parallelize(range(2), 2).map(reaches).collect()
        finally:
            files_at(staging).remove(marker)
        if not all(reached):
            raise SettingsError(f"Spark's executors do not reach {staging}; set staging_dir to a folder that all share")
        return f"version {session.version} on {settings.master}; its tasks reach {staging}"
    finally:
        session.stop()
