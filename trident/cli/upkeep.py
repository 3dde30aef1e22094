"""`compact`: the care of the files of a topology's tables, beside its driver or without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import closing

from stormproof.core.errors import CannotTell, SinkRefused, StoreUnavailable, UsageError
from stormproof.sinks.abilities import SupportsCompact
from stormproof.sinks.protocol import SinkIdentity
from stormproof.trident.audit.inspect import open_for_inspection
from stormproof.trident.audit.ledger import SinkBinding, TopologyRow
from stormproof.trident.cli.layout import counted
from stormproof.trident.cli.output import Exit, emit, finish, note, say
from stormproof.trident.cli.stores import Stores, opened

_MIB = 1024 * 1024


def compact_tables(topology: str, sink: str | None, *, target_mib: int | None, as_json: bool) -> None:
    """Compact one sink's table, or those of every sink that has files; tables that fail are named, and the others go on.

    Raises:
        UsageError: there is no such topology or sink, or the sink's table has no files to compact.
    """
    with opened() as stores:
        row = stores.topology(topology)
        bindings = stores.bindings(row) if sink is None else {sink: stores.binding(row, sink)}
        reports = [_compact(stores, row, binding, target_mib, asked=sink is not None) for binding in bindings.values()]
    done = [report for report in reports if report is not None]
    emit({"topology": topology, "tables": done}, as_json=as_json, text=lambda: _text(topology, done))
    if any(report["error"] is not None for report in done):
        finish(Exit.FAILED)


def _compact(
    stores: Stores, row: TopologyRow, binding: SinkBinding, target_mib: int | None, *, asked: bool
) -> Mapping[str, object] | None:
    identity = SinkIdentity(row.name, row.incarnation, binding.sink)
    report: dict[str, object] = {"sink": binding.sink, "table": binding.target, "error": None}
    try:
        with closing(open_for_inspection(identity, binding, stores.database)) as session:
            if not isinstance(session, SupportsCompact):
                if asked:
                    raise UsageError(
                        f"topology {row.name!r}: sink {binding.sink!r} ({binding.target}) has no files to compact: only "
                        "Delta tables have",
                        sink=binding.sink,
                    )
                return None
            note(f"{binding.sink} ({binding.target}): compacting ...")
            done = session.compact(None if target_mib is None else target_mib * _MIB)
    except CannotTell as error:
        if asked:
            raise
        return {**report, "error": str(error)}
    except (SinkRefused, StoreUnavailable) as error:
        return {**report, "error": str(error)}
    return {
        **report,
        "version": done.version,
        "files_removed": done.removed,
        "files_added": done.added,
        "tries": done.tries,
    }


def _text(topology: str, reports: Sequence[Mapping[str, object]]) -> None:
    if not reports:
        say(f"{topology} has no table with files to compact")
    for report in reports:
        name = f"{topology}: sink {report['sink']} ({report['table']})"
        if report["error"] is not None:
            say(f"{name}: {report['error']}")
        elif report["version"] is None:
            say(f"{name}: no small files, nothing to do")
        else:
            files = counted(int(str(report["files_removed"])), "file")
            say(f"{name}: {files} became {report['files_added']}, in version {report['version']}; no row changed")
