"""A transaction that was given up, whose log entry may still be on its way: a version of the log that keeps it out.

A store that did not answer may carry out a PUT long afterwards, and a driver that was paused inside its commit goes on when
it wakes. Either writes the version behind the one that it had read, or, where that is taken, asks what took it. So a version
with this application's transaction identifier, and nothing else, keeps both out: the PUT finds its name taken, and delta-rs
and Spark give up a commit when they find another one under their own identifier before it. The version names the txid, so
that a driver which then looks again does not begin anew.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from deltalake.exceptions import DeltaError

from stormproof.core.errors import PositionMismatch, SinkRefused, StoreUnavailable
from stormproof.sinks.delta import durable
from stormproof.sinks.delta.failures import is_conflict, may_pass, panics_as_errors, shown
from stormproof.sinks.delta.label import Label
from stormproof.sinks.delta.log import GIVEN_UP, Undo, undo_metadata
from stormproof.sinks.delta.position import find_position
from stormproof.sinks.protocol import PreparedTransaction

if TYPE_CHECKING:
    from stormproof.sinks.delta.hold import TableHold

TRIES_MAX: Final = 20
"""How often the table is looked at anew because other writers' commits came in between."""


def keep_out(hold: TableHold, application: str, transaction: PreparedTransaction) -> int:
    """Write that version, and sync it; returns its number. It says that the sink holds what it held before.

    Guarantee:
        Once it is written, no commit of `transaction` can land.

    Raises:
        PositionMismatch: the table holds the transaction.
        SinkRefused: the table cannot be written to.
        StoreUnavailable: the store does not answer, or other writers kept coming first.
    """
    where = f"{hold.where}, txid {transaction.txid}"
    for _ in range(TRIES_MAX):
        committer = hold.committer()
        with hold.committers.alone(committer):
            table = hold.load()
            position = find_position(hold.log, table, application)
            held = None if position is None else position.txid
            if held == transaction.txid:
                raise PositionMismatch(f"{where}: the table holds it; it arrived after all", txid=held)
            read = table.version()
            known = table.transaction_version(application)
            # Nothing is in this version: as an undo of itself it says what the table holds from here on.
            metadata = {**undo_metadata(application, Undo(read + 1, held)), GIVEN_UP: str(transaction.txid)}
            label = Label(application, max(known or 0, held or 0), metadata, known=known, retries=0)
            try:
                with panics_as_errors():
                    hold.committers.put_label(committer, table, label)
            except (DeltaError, OSError, ValueError) as error:
                if not is_conflict(error):
                    kind = StoreUnavailable if may_pass(error) else SinkRefused
                    raise kind(f"{where}: what may still arrive cannot be kept out: {shown(error)}") from error
                continue
            finally:
                hold.close()
            written = _found(hold, application, after=read)
            if written is not None:
                durable.sync_version(hold.log, hold.load().version())
                return written
    raise StoreUnavailable(f"{where}: other writers keep coming first, or the store does not answer; try again")


def _found(hold: TableHold, application: str, *, after: int) -> int | None:
    return next((e.version for e in hold.log.on_from(after + 1) if e.given_up(application) is not None), None)
