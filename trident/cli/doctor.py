"""`doctor`: checks all that a run needs, and says what to do about what is missing."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar
from uuid import uuid4

from stormproof.core.engine.spark_lines import spark_line
from stormproof.core.errors import SettingsError, StormproofError, UsageError
from stormproof.core.postgres.role import RoleKind
from stormproof.core.settings import Settings
from stormproof.core.storage.address import options_to_send, use_storage
from stormproof.core.storage.files import files_at
from stormproof.trident.cli.doctor_database import durability, queues, refusing, rights, temporary, writes
from stormproof.trident.cli.options import spark_options
from stormproof.trident.cli.output import Exit, emit, finish, say

if TYPE_CHECKING:
    from stormproof.trident.cli.doctor_cluster import ExecutorReport

POSTGRES_MIN: Final = 140_000
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Check:
    """One check; `advice` says what to do if it failed, or if a warning is due."""

    name: str
    ok: bool
    found: str
    advice: str | None = None


def examine(
    *,
    spark: bool,
    cluster: bool = False,
    conf: Sequence[str] = (),
    kind: RoleKind = RoleKind.DRIVER,
    as_json: bool,
) -> None:
    """Make every check, whatever failed before; end with status 1 if one failed."""
    if cluster and not spark:
        raise UsageError("--cluster asks Spark's executors: leave --no-spark away")
    given = spark_options(conf)
    checks = [Check("python", True, f"{sys.version.split()[0]} at {sys.executable}")]
    settings = _looked(
        "settings", lambda: Settings().with_spark(given), _settings_text, "correct what it names", checks
    )
    executors: list[ExecutorReport] = []
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
    from stormproof.core.engine.jars import delta_jars

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


def _cluster(settings: Settings, reaches_database: bool, checks: list[Check]) -> list[ExecutorReport]:
    """Start Spark on the settings' master, ask every executor, and add a check for each."""
    spark_line()
    from stormproof.trident.cli.doctor_cluster import ask_cluster, checks_of, reports_of

    found = _looked("cluster", lambda: ask_cluster(settings, with_database=reaches_database), str, None, checks)
    if found is None:
        return []
    checks += [Check(*check) for check in checks_of(found)]
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
