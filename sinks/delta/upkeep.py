"""What an operator has done to a Delta table: compaction and VACUUM, under the checks of a commit.

*Compaction*: small files become few large ones, without a change of rows. *VACUUM*: files that the table let go of are
removed, and no prepared file.

Files are rewritten by delta-rs (`rewrite`), or by Spark where the table needs it, in one version. Spark syncs nothing that
it writes, so its version is synced here afterwards. A power loss in between may leave the version without its new files.
The old ones are still there, since only a VACUUM removes them: the next start takes such a version back
(`settle_compactions`).

Prepared files of an append lie in the table's folder and are not the table's before their commit. A VACUUM of delta-rs
removes only files that the log names as gone. Spark also removes what the log never named, once it is older than the
retention: a prepared file of a batch that was blocked for so long is put back from its second name
(`sinks.prepare.staging.guard_of`).
"""

from __future__ import annotations

import logging
import os
import time
from typing import Final

from deltalake.exceptions import DeltaError

from stormproof.core.base.errors import Fenced, SinkRefused, StoreUnavailable
from stormproof.core.base.failpoint import failpoint
from stormproof.core.contract.sink import SinkMode
from stormproof.sinks.contract.protocol import Compaction
from stormproof.sinks.delta import power_loss
from stormproof.sinks.delta.features import NO_ZONE, Committer, TableFacts, choose, refusal
from stormproof.sinks.delta.log import COMPACTS, live_files
from stormproof.sinks.delta.rewrite import COMPACTED, LEFT_OVER_S, rewrite
from stormproof.sinks.delta.transactional_table import TransactionalTable, require_settled, settle_compactions
from stormproof.sinks.delta.versions import is_conflict, may_pass, panics_as_errors, shown

log = logging.getLogger("stormproof.sink")

COMPACTION_TRIES_MAX: Final = 5
"""How often a compaction is tried again after other writers' commits that removed files under it."""


def compact(
    ours: TransactionalTable, application: str, epoch: int | None, target_bytes: int | None = None
) -> Compaction:
    """Compact the files that are smaller than `target_bytes` (None: `delta.targetFileSize`, or the writer's default).

    `epoch`: a driver's, which leaves the table to a newer one; None: a command's.

    Guarantee:
        Rows, transaction identifiers and evidence stay as they are, after a crash at any point, too.

    Raises:
        StoreUnavailable: other writers kept changing the same files, or something of the machine's is missing.
        SinkRefused: the table refuses it, or has partition values that a rewriting would change.
        Fenced: a newer epoch has committed.
    """
    for attempt in range(1, COMPACTION_TRIES_MAX + 1):
        committer = ours.committers.of_files(ours.load())
        try:
            settle_compactions(ours, application)
            with ours.committers.alone_with_lock(committer):
                return _compact_once(ours, application, epoch, committer, target_bytes, attempt)
        except (DeltaError, OSError, ValueError) as error:
            ours.close()
            if attempt < COMPACTION_TRIES_MAX and is_conflict(error):
                log.info("%s: another writer came first; the compaction begins again", ours.where)
                continue
            kind = StoreUnavailable if may_pass(error) else SinkRefused
            raise kind(
                f"{ours.where}: the compaction failed (tried {attempt} times), and no row is changed: {shown(error)}"
            ) from error
    raise AssertionError("unreachable")


def commits_since_compaction(ours: TransactionalTable, application: str, most: int) -> int:
    """How many commits of ours are in the log behind the last compaction, counted no further than to `most`."""
    commits = 0
    for entry in ours.log.back_from(ours.load().version()):
        if commits >= most or entry.compacts(application):
            break
        commits += entry.ours(application) is not None
    return commits


def _compact_once(
    ours: TransactionalTable,
    application: str,
    epoch: int | None,
    committer: Committer,
    target_bytes: int | None,
    attempt: int,
) -> Compaction:
    table = ours.load()
    for found in choose(TableFacts.of(table, SinkMode.UPSERT), SinkMode.UPSERT).refused:
        if found.feature.by_key is NO_ZONE:
            raise SinkRefused(f"{ours.where}: {refusal(found, SinkMode.UPSERT)}")
    position = ours.position(table, same_table=True)
    if epoch is not None and position is not None and position.commit is not None and position.commit.epoch > epoch:
        raise Fenced(f"{ours.where}: epoch {position.commit.epoch} has committed here, this is epoch {epoch}")
    if committer is Committer.SPARK:
        table = ours.narrowed(table, committer, ours.where)
    before = table.version()
    failpoint("compact.before")
    if committer is Committer.SPARK:
        ours.committers.spark.compact({COMPACTS: application}, target_bytes)
    else:
        rewrite(ours.log, table, application, target_bytes)
    failpoint("compact.after_log_entry")
    made = next((entry for entry in ours.log.on_from(before + 1) if entry.compacts(application)), None)
    if made is None:
        return Compaction(None, 0, 0, attempt)
    power_loss.sync_versions(ours.log, before + 1, made.version)
    failpoint("compact.after_sync")
    whole = ours.log.entry(made.version)
    assert whole is not None
    return Compaction(made.version, len(whole.removed), len(whole.added), attempt)


def vacuum(ours: TransactionalTable, application: str, retained_hours: int | None, *, dry_run: bool) -> list[str]:
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
        table = ours.load()
        require_settled(ours, application)
        before = table.version()
        power_loss.sync_tail(ours.log, before)  # what took the files out must outlive them
        committer = ours.committers.of_files(table)
        with ours.committers.alone_with_lock(committer):
            if committer is Committer.SPARK:
                gone = ours.committers.spark.vacuum(retained_hours, dry_run=dry_run)
            else:
                with panics_as_errors():
                    gone = table.vacuum(retained_hours, dry_run=dry_run, enforce_retention_duration=False)
        power_loss.sync_versions(ours.log, before + 1, ours.load().version())
        return [*gone, *_left_over(ours, dry_run=dry_run)]
    except (DeltaError, OSError, ValueError) as error:
        kind = StoreUnavailable if may_pass(error) else SinkRefused
        raise kind(f"{ours.where}: VACUUM failed; no live row is touched: {shown(error)}") from error


def _left_over(ours: TransactionalTable, *, dry_run: bool) -> list[str]:
    """Remove the files that failed compactions left more than a day ago: no version names them. Until then a store may carry
    out the PUT of one.
    """
    log = ours.log
    unnamed = set(log.files.list(log.table, COMPACTED)) - live_files(ours.load()).keys()
    for entry in map(log.entry, log.versions() if unnamed else ()):
        if entry is not None:
            unnamed -= {*(file.path for file in entry.added), *(path for path, _ in entry.removed)}
    states = {name: log.files.stat(os.path.join(log.table, name)) for name in sorted(unnamed)}
    gone = [n for n, now in states.items() if now is not None and now.modified_ns / 1e9 < time.time() - LEFT_OVER_S]
    for name in () if dry_run else gone:
        log.files.remove(os.path.join(log.table, name))
    return gone
