"""Broken variants of the code, for negative controls: each breaks this process for good, so use them in a child."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager

import psycopg

from stormproof.core.guarantee import Guarantee
from stormproof.core.source.postgres_queue import slices
from stormproof.core.source.postgres_queue.slices import Position, Subscriber
from stormproof.core.source.protocol import Resolution
from stormproof.sinks.postgres.session import PostgresSession
from stormproof.sinks.protocol import CommitOutcome
from stormproof.trident import recovery
from stormproof.trident.ledger.ledger import Ledger, Tx
from stormproof.trident.ledger.rows import Run, SinkWork, Txn
from stormproof.trident.steps import Steps
from stormproof.trident.transaction import TxnState


def no_fence() -> None:
    """Nobody looks at the epoch: not the ledger, not the queue, not the Postgres sink."""

    @contextmanager
    def transaction(ledger: Ledger, run: Run) -> Generator[Tx]:
        with ledger._begin() as connection:  # pyright: ignore[reportPrivateUsage]
            yield Tx(connection, run)

    def lock(cursor: psycopg.Cursor, who: Subscriber, _epoch: int) -> Position | None:
        return slices.position_of(cursor, who, locked=True)

    _replace(Ledger, "transaction", transaction)
    _replace(slices, "lock", lock)
    _replace(PostgresSession, "_lock_fence", lambda *_: None)


def confirm_before_commit() -> None:
    """The messages are confirmed, and `committed` is recorded, before the sinks hold the batch."""
    commit, finish = Steps.commit, Steps.finish

    def early(steps: Steps, txid: int, guarantee: Guarantee, work: Mapping[str, SinkWork]) -> dict[str, CommitOutcome]:
        finish(steps, txid, guarantee, TxnState.PREPARED, {}, (), {}, {})
        return commit(steps, txid, guarantee, work)

    _replace(Steps, "commit", early)
    _replace(Steps, "finish", lambda *_: Resolution())


def take_nothing_for_everything() -> None:
    """Recovery commits whatever the ledger's rows say, be it nothing."""
    commit, finish = Steps.commit, Steps.finish

    def roll_forward(steps: Steps, txn: Txn, _done: object) -> None:
        with steps.ledger.transaction(steps.run) as tx:
            work = steps.ledger.work(tx, txn.txid)
        outcomes = commit(steps, txn.txid, txn.guarantee, work)
        finish(steps, txn.txid, txn.guarantee, TxnState.PREPARED, work, (), outcomes, {})

    _replace(recovery, "_roll_forward", roll_forward)


def _replace(owner: object, name: str, value: object) -> None:
    assert hasattr(owner, name), f"{owner} has no {name} to break"
    setattr(owner, name, value)
