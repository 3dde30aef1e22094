"""What an operator decides: `retry`, `dead-letters list|requeue|drop`; each is recorded with who and why."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stormproof.core.clock import SystemClock
from stormproof.core.errors import Json, UsageError
from stormproof.core.message import storable_text
from stormproof.core.source.dead_letter import DeadLetter
from stormproof.core.source.files.rows import shown_payload
from stormproof.core.source.files.source import FileStore
from stormproof.core.source.group import shown, sources_in, unshown
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.sinks.protocol import RestoresLost, SinkIdentity
from stormproof.trident.audit import AuditLedger, opener_for
from stormproof.trident.audit.evidence import StoredSource
from stormproof.trident.audit.files import FileEvidence
from stormproof.trident.audit.source import QueueEvidence, group_sources, queue_reader
from stormproof.trident.cli.output import Exit, emit, finish, note, say, table
from stormproof.trident.cli.stores import Stores, opened, operator
from stormproof.trident.ledger.ledger import ADOPTED, Ledger, Tx
from stormproof.trident.ledger.rows import Event, Run
from stormproof.trident.steps import to_prepared
from stormproof.trident.transaction import EventKind, TxnState

if TYPE_CHECKING:
    from stormproof.trident.audit.ledger import TopologyRow


_LIFE: Final = re.compile(r"[^/\s]+/[A-Za-z0-9_.-]+|[0-9a-f]+(-[0-9a-f]+)*")
"""How a refused start names another life. A streaming query's has the query's id."""


def retry_txid(topology: str, txid: int, *, by: str, why: str, as_json: bool) -> None:
    """Blocked to prepared: the topology's next start tries the commit again."""
    by = by or operator()
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
            # First the sinks: killed in between, the batch is still blocked, and a further `retry` finds nothing lost.
            restored = _restore_lost(stores, tx, ledger, row, txid)
            ledger.move(tx, txid, TxnState.BLOCKED, TxnState.PREPARED, reason=None)
            detail: dict[str, Json] = {
                "action": "retry",
                "by": by,
                "why": storable_text(why),
                "restored": {sink: storable_text(text) for sink, text in restored.items()},
            }
            ledger.record(tx, [Event(EventKind.OPERATOR, txid=txid, reason=f"retry by {by}", detail=detail)])
    report = {
        "topology": topology,
        "txid": txid,
        "state": TxnState.PREPARED.value,
        "by": by,
        "restored": restored,
    }
    emit(report, as_json=as_json, text=lambda: _retry_text(topology, txid, restored))


def _retry_text(topology: str, txid: int, restored: Mapping[str, str]) -> None:
    for sink, text in restored.items():
        say(f"sink {sink}: {text}")
    say(f"txid {txid} of {topology} is prepared again; the next start of {topology} commits it")


def _restore_lost(stores: Stores, tx: Tx, ledger: Ledger, row: TopologyRow, txid: int) -> dict[str, str]:
    """Have each sink that holds the batch, and lost files of it to a power loss, go back to what it was before it.

    Raises:
        SinkRefused: a sink cannot go back; the batch stays blocked.
    """
    work, _ = ledger.owed_work(tx, txid)
    with stores.audit.snapshot() as snapshot:
        bindings = {binding.sink: binding for binding in snapshot.sinks(row.incarnation)}
    restored: dict[str, str] = {}
    for sink, item in work.items():
        binding = bindings.get(sink)
        if binding is None or (binding.description or {}).get("kind") not in ("delta", "delta-map"):
            continue  # only a Delta table can hold a batch without its files
        with closing(opener_for(stores.database)(SinkIdentity(row.name, row.incarnation, sink), binding)) as session:
            done = session.restore_lost(to_prepared(txid, item)) if isinstance(session, RestoresLost) else None
        if done is not None:
            restored[sink] = done
    return restored


def adopt_incarnation(topology: str, incarnation: str, *, by: str, why: str, as_json: bool) -> None:
    """Let a topology write beside what another life of its name left in a table."""
    by = by or operator()
    with opened() as stores:
        with stores.audit.snapshot() as snapshot:
            row = snapshot.topology(topology)
        if not _LIFE.fullmatch(incarnation) or incarnation == row.incarnation:
            raise UsageError(
                f"{incarnation!r} is no other life than {topology}'s own ({row.incarnation}): give INCARNATION or "
                "NAME/INCARNATION as the refused start names it",
                incarnation=incarnation,
            )
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


@dataclass(frozen=True, slots=True)
class _Letters:
    """The dead letters of a topology's source, or of the sources of its spouts, which then stand before the ids."""

    sources: Mapping[str | None, PostgresQueue | FileStore]

    def all(self) -> list[tuple[str, DeadLetter]]:
        """Every dead letter, with its id as the topology shows it."""
        return [
            (_shown(spout, letter.shown_id), letter)
            for spout, source in self.sources.items()
            for letter in source.dead_letters()
        ]

    def dispose(self, ids: Sequence[str], *, requeue: bool, by: str, why: str) -> list[str]:
        """Requeue or drop; returns those that were dead."""
        done: list[str] = []
        for spout, source in self.sources.items():
            act = source.requeue if requeue else source.drop
            mine = [inner for one in ids if (inner := _inner(spout, one)) is not None]
            done += [_shown(spout, inner) for inner in act(mine, by=by, why=why)]
        return done


def _shown(spout: str | None, inner: str) -> str:
    return inner if spout is None else shown(spout, inner)


def _inner(spout: str | None, message: str) -> str | None:
    """A message's id in the source of a spout; None where it is another spout's."""
    if spout is None:
        return message
    named = unshown(message)
    return named[1] if named is not None and named[0] == spout else None


@contextmanager
def _letters_of(topology: str) -> Generator[_Letters]:
    """The topology's sources, under its subscriptions; fences nobody."""
    with opened() as stores, ExitStack() as stack:
        epoch, found = _evidence(stores.audit, topology)
        sources: dict[str | None, PostgresQueue | FileStore] = {}
        for spout, evidence in found.items():
            if isinstance(evidence, FileEvidence):
                sources[spout] = files = FileStore(evidence.name, database=stores.database)
                stack.callback(files.close)
                files.look_at(evidence.subscription)
            else:
                sources[spout] = queue = PostgresQueue(evidence.name, database=stores.database)
                stack.callback(queue.close)
                queue.subscribe(evidence.subscription, epoch)
        yield _Letters(sources)


def _evidence(ledger: AuditLedger, topology: str) -> tuple[int, Mapping[str | None, StoredSource]]:
    """The topology's epoch and sources, by spout; by None where it has only one."""
    with ledger.snapshot() as snapshot:
        row = snapshot.topology(topology)
        found = queue_reader(snapshot, row)
        if isinstance(found, (QueueEvidence, FileEvidence)):
            return row.epoch, {None: found}
        members = group_sources(snapshot, row)
        if not members:
            raise UsageError(
                f"topology {topology!r} reads {row.source!r}, which is neither a queue nor files in the ledger's "
                "database: its dead letters are kept by the source itself, where no command reaches them",
                topology=topology,
            )
        elsewhere = [spout for spout in sources_in(row.source) if spout not in members]
        if elsewhere:
            note(f"stormproof: dead letters of {', '.join(elsewhere)} are kept elsewhere, not in the ledger's database")
        by_spout: dict[str | None, StoredSource] = dict(members.items())
        return row.epoch, by_spout


def list_letters(topology: str, *, as_json: bool) -> None:
    """All dead letters."""
    with _letters_of(topology) as found:
        letters = found.all()
    report = {
        "topology": topology,
        "dead_letters": [
            {
                "id": message,
                "reason": letter.reason,
                "error": letter.error,
                "times_opened": letter.times_opened,
                "times_failed": letter.times_failed,
                "dead_at": letter.dead_at,
                "text": storable_text(shown_payload(letter.payload)),
                "history": letter.history,
                "disposal": letter.disposal,
                "by": letter.by,
                "why": letter.why,
                "disposed_at": letter.disposed_at,
            }
            for message, letter in letters
        ],
    }
    emit(
        report,
        as_json=as_json,
        text=lambda: table(
            ["id", "reason", "failed", "dead since", "disposal", "by", "error"],
            [(m, d.reason, d.times_failed, d.dead_at, d.disposal, d.by, d.error[:200]) for m, d in letters],
        ),
    )


def dispose(topology: str, ids: Sequence[str], *, every: bool, requeue: bool, by: str, why: str, as_json: bool) -> None:
    """Requeue or drop dead letters; status 1 where one of those named was not a dead letter any more."""
    if bool(ids) == every:
        raise UsageError("name the messages' ids, or --all, and not both")
    by = by or operator()
    with _letters_of(topology) as found:
        chosen = [message for message, d in found.all() if d.disposal is None] if every else list(ids)
        done = found.dispose(chosen, requeue=requeue, by=by, why=storable_text(why))
    missed = [shown for shown in chosen if shown not in done]
    verb = "requeued" if requeue else "dropped"
    report = {"topology": topology, verb: done, "not_dead": missed, "by": by}
    emit(report, as_json=as_json, text=lambda: say(f"{topology}: {len(done)} dead letters {verb}"))
    if missed:
        note(f"stormproof: not dead letters (any more): {', '.join(missed[:10])}")
        finish(Exit.FAILED)
