"""Opens a run's sinks on the very tables that the ledger knows; makes a table only where it knows none."""

from __future__ import annotations

from collections.abc import Collection, Generator
from contextlib import contextmanager

from stormproof.core.errors import FatalError, PositionMismatch, SinkRefused
from stormproof.core.message import storable_text
from stormproof.core.sink import SinkInput
from stormproof.sinks.protocol import PROBLEM, Sink, SinkIdentity, SinkProblem, SinkSession
from stormproof.trident.ledger import events
from stormproof.trident.ledger.bindings import Bound
from stormproof.trident.ledger.ledger import Ledger
from stormproof.trident.ledger.rows import Event, Run
from stormproof.trident.transaction import EventKind


def open_bound(sink: Sink, input_: SinkInput, run: Run, bound: Bound | None) -> SinkSession:
    """Open a sink. Where the ledger knows its table (`bound`) none is made: an empty one in its place would hide a loss.

    A driver that died between making a table and binding it finds that table; the ledger knows none yet.

    Raises:
        PositionMismatch: the known table is gone, or the sink names another one that is not there.
        SinkRefused: the table cannot hold the rows.
    """
    identity = SinkIdentity(run.topology, run.incarnation, sink.name)
    try:
        # One that was in another process's memory is made anew: recovery compares what it holds.
        return sink.open(identity, input_, run.epoch, create=bound is None or sink.is_new_in_process)
    except SinkRefused as error:
        if bound is not None and error.details.get(PROBLEM) == SinkProblem.TABLE_GONE:
            raise bound.is_gone(sink.target) from error
        raise _refused(error, run, sink.name, bound) from error


def _refused(error: SinkRefused, run: Run, sink: str, bound: Bound | None) -> SinkRefused:
    way_on = (
        "give the sink another table"
        if bound is None
        else "give the sink a new name and a new table, which begin behind the newest txid"
    )
    return SinkRefused(
        f"topology {run.topology!r} cannot start: {error}. Nothing was written. Repair the table and start again "
        f"(stormproof status shows what waits for it); or {way_on}",
        **{**error.details, "sink": sink},
    )


def claim_table(session: SinkSession, target: str, accepted: Collection[str]) -> None:
    """Have the table itself say whose it is, before it is bound: another topology's ledger may be in another database.

    Raises:
        PositionMismatch: another life has claimed it first, and may commit to it at any time; nothing was written.
    """
    strangers = session.claim(accepted)
    if not strangers:
        return
    mine, life = session.identity, strangers[0]
    topology = life.partition("/")[0] if "/" in life else mine.topology
    raise PositionMismatch(
        f"sink {mine.sink!r} of topology {mine.topology!r}: {target} was claimed by topology {topology!r} (life {life}), "
        f"which may write to it at any time, and by this topology's ledger it is not that one. Nothing was written. Use "
        f"another table; or, where that topology never wrote to it and is not to: stormproof ledger release-table "
        f"{topology} SINK, in its database; or, to write beside it: stormproof ledger adopt {mine.topology} {life}",
        sink=mine.sink,
        claimed_by=[*strangers],
    )


@contextmanager
def refusal_on_record(ledger: Ledger, run: Run, sink: str) -> Generator[None]:
    """Record why a start was refused at this sink, so that `status` names it where the driver's own output is not at hand.

    Raises:
        FatalError: what was raised inside, once it is recorded.
        Fenced: another driver took over, so nobody needs to know.
    """
    try:
        yield
    except (PositionMismatch, SinkRefused) as error:
        _record(ledger, run, sink, error)
        raise


def _record(ledger: Ledger, run: Run, sink: str, error: FatalError) -> None:
    with ledger.transaction(run) as tx:
        reason = storable_text(error.message)
        events.record(tx, [Event(EventKind.START_REFUSED, sink=sink, error=reason, detail={"epoch": run.epoch})])
