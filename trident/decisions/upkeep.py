"""`compact`, `vacuum` and `repair`: the upkeep of the files of a topology's tables, beside its driver or without one.

Each table's is put on record before the table is touched, so that none goes without.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field

from stormproof.core.base.errors import CannotTell, Json, SinkRefused, StoreUnavailable, UsageError
from stormproof.core.storage.protocol import is_url
from stormproof.sinks.contract.protocol import SinkIdentity, SupportsUpkeep
from stormproof.trident.audit.inspect import open_for_inspection
from stormproof.trident.audit.ledger import TopologyRow
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.ledger.sink_records import SinkBinding
from stormproof.trident.terms.transaction_states import OperatorAction
from stormproof.trident.terms.wording import counted

_MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class UpkeepReport:
    """What was done to each table, or why it could not be."""

    topology: str
    action: OperatorAction
    tables: tuple[Mapping[str, object], ...]

    def lines(self) -> list[str]:
        """What was done, for people."""
        if not self.tables:
            return [f"{self.topology} has no table with files to {self.action.value}"]
        tell = {OperatorAction.COMPACT: _compacted, OperatorAction.VACUUM: _vacuumed, OperatorAction.REPAIR: _repaired}
        return [
            f"{self.topology}: sink {one['sink']} ({one['table']}): "
            f"{tell[self.action](one) if one['error'] is None else one['error']}"
            for one in self.tables
        ]

    @property
    def exit_status(self) -> int:
        """1: a table could not be kept up; 4: a repair left something as it is."""
        if any(one["error"] is not None for one in self.tables):
            return 1
        return 4 if any(one.get("left") for one in self.tables) else 0


@dataclass(frozen=True, slots=True)
class _Upkeep:
    """What an operator decided about the tables, and does to each. `recorded` is false where nothing is changed."""

    action: OperatorAction
    by: str
    why: str
    doing: str
    work: Callable[[SupportsUpkeep], Mapping[str, object]]
    told: Callable[[str], None]
    detail: Mapping[str, Json] = field(default_factory=dict[str, Json])
    recorded: bool = True

    def record(self, stores: Stores, topology: str, sink: str) -> None:
        """Put it on record for one table."""
        if not self.recorded:
            return
        with stores.transaction(stores.topology(topology)) as tx:
            tx.decided(self.action, by=self.by, why=self.why, about=sink, sink=sink, detail=self.detail)


def compact(
    stores: Stores,
    table: str,
    *,
    sink: str | None,
    target_mib: int | None,
    by: str,
    why: str,
    told: Callable[[str], None] = lambda _: None,
) -> UpkeepReport:
    """Compact one sink's table, or those of every sink that has files; tables that fail are named, and the others go on.

    Raises:
        UsageError: there is no such topology, table or sink, or the sink's table has no files to compact.
    """

    def work(session: SupportsUpkeep) -> Mapping[str, object]:
        done = session.compact(None if target_mib is None else target_mib * _MIB)
        return {
            "version": done.version,
            "files_removed": done.removed,
            "files_added": done.added,
            "tries": done.tries,
        }

    detail: dict[str, Json] = {"target_mib": target_mib}
    upkeep = _Upkeep(OperatorAction.COMPACT, by, why, "compacting", work, told, detail)
    return _each_table(stores, table, sink, upkeep)


def vacuum(
    stores: Stores,
    table: str,
    *,
    sink: str | None,
    retain_hours: int | None,
    dry_run: bool,
    by: str,
    why: str,
    told: Callable[[str], None] = lambda _: None,
) -> UpkeepReport:
    """Remove the files that one sink's table, or those of every sink, let go of; otherwise as `compact`."""

    def work(session: SupportsUpkeep) -> Mapping[str, object]:
        return {"files": sorted(session.vacuum(retain_hours, dry_run=dry_run)), "dry_run": dry_run}

    doing = "looking for files that no version needs" if dry_run else "removing files that no version needs"
    detail: dict[str, Json] = {"retained_hours": retain_hours}
    upkeep = _Upkeep(OperatorAction.VACUUM, by, why, doing, work, told, detail, recorded=not dry_run)
    return _each_table(stores, table, sink, upkeep)


def repair(
    stores: Stores,
    table: str,
    *,
    sink: str | None,
    dry_run: bool,
    by: str,
    why: str,
    told: Callable[[str], None] = lambda _: None,
) -> UpkeepReport:
    """Repair the statistics and the doubled keys of one sink's table, or of those of every sink; otherwise as `compact`."""

    def work(session: SupportsUpkeep) -> Mapping[str, object]:
        return {**asdict(session.repair(dry_run=dry_run)), "dry_run": dry_run}

    doing = f"{'looking for' if dry_run else 'mending'} statistics and keys that are wrong"
    upkeep = _Upkeep(OperatorAction.REPAIR, by, why, doing, work, told, recorded=not dry_run)
    return _each_table(stores, table, sink, upkeep)


def _named(stores: Stores, table: str, sink: str | None) -> tuple[str, str | None]:
    """The topology, and the sink where a table is named."""
    with stores.audit.snapshot() as snapshot:
        topologies = snapshot.topologies()
        if any(row.name == table for row in topologies):
            return table, sink
        path = table if is_url(table) else os.path.abspath(table)
        for row in topologies:
            for binding in snapshot.sinks(row.incarnation):
                if binding.target in (table, path):
                    return row.name, binding.sink
    known = ", ".join(row.name for row in topologies) or "none; it was never run here"
    raise UsageError(
        f"the ledger knows no topology and no sink's table {table!r}; known topologies: {known}", name=table
    )


def _each_table(stores: Stores, table: str, sink: str | None, upkeep: _Upkeep) -> UpkeepReport:
    topology, sink = _named(stores, table, sink)
    row = stores.topology(topology)
    bindings = stores.bindings(row) if sink is None else {sink: stores.binding(row, sink)}
    reports = [_report(stores, row, b, upkeep, asked=sink is not None) for b in bindings.values()]
    done = tuple(report for report in reports if report is not None)
    if sink is not None and not done:
        raise UsageError(
            f"topology {topology!r}: sink {sink!r} ({bindings[sink].target}) has no files to {upkeep.action.value}: only "
            "Delta tables have",
            sink=sink,
        )
    return UpkeepReport(topology, upkeep.action, done)


def _report(
    stores: Stores, row: TopologyRow, binding: SinkBinding, upkeep: _Upkeep, *, asked: bool
) -> Mapping[str, object] | None:
    identity = SinkIdentity(row.name, row.incarnation, binding.sink)
    report: dict[str, object] = {"sink": binding.sink, "table": binding.target, "error": None}
    try:
        with closing(open_for_inspection(identity, binding, stores.database)) as session:
            if not isinstance(session, SupportsUpkeep):
                return None
            upkeep.told(f"{binding.sink} ({binding.target}): {upkeep.doing} ...")
            upkeep.record(stores, row.name, binding.sink)
            return {**report, **upkeep.work(session)}
    except CannotTell as error:
        if asked:
            raise
        return {**report, "error": str(error)}
    except (SinkRefused, StoreUnavailable) as error:
        return {**report, "error": str(error)}


def _compacted(report: Mapping[str, object]) -> str:
    if report["version"] is None:
        return "no small files, nothing to do"
    files = counted(int(str(report["files_removed"])), "file")
    return f"{files} became {report['files_added']}, in version {report['version']}; no row changed"


def _vacuumed(report: Mapping[str, object]) -> str:
    found = report["files"]
    assert isinstance(found, list)
    if not report["dry_run"]:
        return f"{counted(len(found), 'file')} removed"
    return "".join([f"{counted(len(found), 'file')} would go", *(f"\n  {path}" for path in found)])


def _repaired(report: Mapping[str, object]) -> str:
    files, left = report["files"], report["left"]
    assert isinstance(files, list)
    assert isinstance(left, list)
    keys = int(str(report["doubled_keys"]))
    found = [
        *([f"{counted(len(files), 'file')} with statistics that exclude rows"] if files else []),
        *([f"{counted(keys, 'key')} more than once, {report['rows_removed']} rows to remove"] if keys else []),
    ]
    done = "nothing is wrong" if not found else " and ".join(found)
    if report["version"] is not None:
        done += f": mended in version {report['version']}"
    return "".join([done, *(f"\n  left as it is: {text}" for text in left)])
