"""What an operator decides: `retry`, `dead-letters list|requeue|drop`; each is recorded with who and why."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager

from stormproof.core.clock import SystemClock
from stormproof.core.errors import UsageError
from stormproof.core.message import storable_text
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.trident.audit import AuditLedger
from stormproof.trident.audit.source import QueueEvidence, queue_reader
from stormproof.trident.cli.output import Exit, emit, finish, note, say, table
from stormproof.trident.cli.stores import opened, operator
from stormproof.trident.ledger.ledger import ADOPTED, Ledger
from stormproof.trident.ledger.rows import Event, Run
from stormproof.trident.transaction import EventKind, TxnState


def retry_txid(topology: str, txid: int, *, why: str, as_json: bool) -> None:
    """Blocked to prepared: the topology's next start tries the commit again."""
    by = operator()
    with opened() as stores:
        with stores.audit.snapshot() as snapshot:
            row = snapshot.topology(topology)
            found = snapshot.txns(row.incarnation, txid, txid)
        if not found or found[0].state is not TxnState.BLOCKED:
            now = f"is {found[0].state}" if found else "does not exist"
            raise UsageError(
                f"txid {txid} of topology {topology!r} {now}; only a blocked one can be retried", txid=txid
            )
        ledger = Ledger(stores.engine, SystemClock(), _no_incarnation)
        with ledger.transaction(Run(topology, row.incarnation, row.epoch)) as tx:
            ledger.move(tx, txid, TxnState.BLOCKED, TxnState.PREPARED, reason=None)
            detail = {"action": "retry", "by": by, "why": storable_text(why)}
            ledger.record(tx, [Event(EventKind.OPERATOR, txid=txid, reason=f"retry by {by}", detail={**detail})])
    report = {"topology": topology, "txid": txid, "state": TxnState.PREPARED.value, "by": by}
    emit(
        report,
        as_json=as_json,
        text=lambda: say(f"txid {txid} of {topology} is prepared again; the next start of {topology} commits it"),
    )


def adopt_incarnation(topology: str, incarnation: str, *, why: str, as_json: bool) -> None:
    """Let a topology write beside what another life of its name left in a table."""
    by = operator()
    with opened() as stores:
        with stores.audit.snapshot() as snapshot:
            row = snapshot.topology(topology)
        ledger = Ledger(stores.engine, SystemClock(), _no_incarnation)
        with ledger.transaction(Run(topology, row.incarnation, row.epoch)) as tx:
            detail = {"action": "adopt", "by": by, "why": storable_text(why)}
            ledger.record(tx, [Event(EventKind.OPERATOR, message=incarnation, reason=ADOPTED, detail={**detail})])
    report = {"topology": topology, "incarnation": row.incarnation, "adopted": incarnation, "by": by}
    emit(
        report,
        as_json=as_json,
        text=lambda: say(f"{topology} may write beside what incarnation {incarnation} left; its rows stay as they are"),
    )


def _no_incarnation() -> str:
    raise AssertionError("an operator's command starts no topology")


@contextmanager
def _queue_of(topology: str) -> Generator[PostgresQueue]:
    """The topology's queue, under its subscription; fences nobody."""
    with opened() as stores:
        row, evidence = _evidence(stores.audit, topology)
        queue = PostgresQueue(evidence.name, database=stores.database)
        try:
            queue.subscribe(evidence.subscription, row)
            yield queue
        finally:
            queue.close()


def _evidence(ledger: AuditLedger, topology: str) -> tuple[int, QueueEvidence]:
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(topology)
        found = queue_reader(snapshot, row)
        if not isinstance(found, QueueEvidence):
            raise UsageError(
                f"topology {topology!r} reads {row.source!r}, which is not a queue in the ledger's database: its dead "
                "letters are kept there",
                topology=topology,
            )
        return row.epoch, found


def list_letters(topology: str, *, as_json: bool) -> None:
    """All dead letters."""
    with _queue_of(topology) as queue:
        letters = queue.dead_letters()
    report = {
        "topology": topology,
        "dead_letters": [
            {
                "id": letter.shown_id,
                "reason": letter.reason,
                "error": letter.error,
                "times_opened": letter.times_opened,
                "times_failed": letter.times_failed,
                "dead_at": letter.dead_at,
                "text": storable_text(letter.payload.decode("utf-8", "backslashreplace")),
                "history": letter.history,
                "disposal": letter.disposal,
                "by": letter.by,
                "why": letter.why,
                "disposed_at": letter.disposed_at,
            }
            for letter in letters
        ],
    }
    emit(
        report,
        as_json=as_json,
        text=lambda: table(
            ["id", "reason", "failed", "dead since", "disposal", "by", "error"],
            [(d.shown_id, d.reason, d.times_failed, d.dead_at, d.disposal, d.by, d.error[:200]) for d in letters],
        ),
    )


def dispose(topology: str, ids: Sequence[str], *, every: bool, requeue: bool, why: str, as_json: bool) -> None:
    """Requeue or drop dead letters; status 1 where one of those named was not a dead letter any more."""
    if bool(ids) == every:
        raise UsageError("name the messages' ids, or --all, and not both")
    by = operator()
    with _queue_of(topology) as queue:
        chosen = [d.shown_id for d in queue.dead_letters() if d.disposal is None] if every else list(ids)
        act = queue.requeue if requeue else queue.drop
        done = act(chosen, by=by, why=storable_text(why))
    missed = [shown for shown in chosen if shown not in done]
    verb = "requeued" if requeue else "dropped"
    report = {"topology": topology, verb: list(done), "not_dead": missed, "by": by}
    emit(report, as_json=as_json, text=lambda: say(f"{topology}: {len(done)} dead letters {verb}"))
    if missed:
        note(f"stormproof: not dead letters (any more): {', '.join(missed[:10])}")
        finish(Exit.FAILED)
