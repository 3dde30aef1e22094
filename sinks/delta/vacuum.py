"""VACUUM of a Delta sink's table: files that the table let go of are removed, and no prepared file.

Prepared files of an append lie in the table's folder and are not the table's before their commit. delta-rs removes only
files that the log names as gone. Spark also removes what the log never named, once it is older than the retention: a
prepared file of a batch that was blocked for so long is put back from its second name (`sinks.staging.guard_of`).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING

from deltalake.exceptions import DeltaError

from stormproof.core.errors import SinkRefused, StoreUnavailable
from stormproof.sinks.delta import durable
from stormproof.sinks.delta.compaction import require_settled
from stormproof.sinks.delta.evidence import live_files
from stormproof.sinks.delta.failures import may_pass, panics_as_errors, shown
from stormproof.sinks.delta.features import Committer
from stormproof.sinks.delta.rewrite import COMPACTED, LEFT_OVER_S

if TYPE_CHECKING:
    from stormproof.sinks.delta.hold import TableHold


def vacuum(hold: TableHold, application: str, retained_hours: int | None, *, dry_run: bool) -> list[str]:
    """Remove the files that the table let go of more than so many hours ago. Returns their paths; with `dry_run` they stay.

    `retained_hours` None: `delta.deletedFileRetentionDuration`, or a week. Below an hour, a MERGE may miss files that it has
    found in the table.

    Guarantee:
        Every live row stays, and every prepared file. Older versions of the table can no longer be read.

    Raises:
        SinkRefused: a compaction lost its files to a power loss, so that the old ones are needed still; or the table refuses
            it.
        StoreUnavailable: something of the machine's is missing.
    """
    try:
        table = hold.load()
        require_settled(hold, application)
        before = table.version()
        durable.sync_tail(hold.log, before)  # what took the files out must outlive them
        committer = hold.committers.of_files(table)
        with hold.committers.alone_with_lock(committer):
            if committer is Committer.SPARK:
                gone = hold.committers.spark.vacuum(retained_hours, dry_run=dry_run)
            else:
                with panics_as_errors():
                    gone = table.vacuum(retained_hours, dry_run=dry_run, enforce_retention_duration=False)
        durable.sync_versions(hold.log, before + 1, hold.load().version())
        return [*gone, *_left_over(hold, dry_run=dry_run)]
    except (DeltaError, OSError, ValueError) as error:
        kind = StoreUnavailable if may_pass(error) else SinkRefused
        raise kind(f"{hold.where}: VACUUM failed; no live row is touched: {shown(error)}") from error


def _left_over(hold: TableHold, *, dry_run: bool) -> list[str]:
    """Remove the files that failed compactions left more than a day ago: no version names them. Until then a store may carry
    out the PUT of one.
    """
    log = hold.log
    unnamed = set(log.files.list(log.table, COMPACTED)) - live_files(hold.load()).keys()
    for entry in map(log.entry, log.versions() if unnamed else ()):
        if entry is not None:
            unnamed -= {*(file.path for file in entry.added), *(path for path, _ in entry.removed)}
    states = {name: log.files.stat(os.path.join(log.table, name)) for name in sorted(unnamed)}
    gone = [n for n, now in states.items() if now is not None and now.modified_ns / 1e9 < time.time() - LEFT_OVER_S]
    for name in () if dry_run else gone:
        log.files.remove(os.path.join(log.table, name))
    return gone
