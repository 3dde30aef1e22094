"""Broken variants of what takes micro-batches, for negative controls: each breaks its process for good."""

from __future__ import annotations

import uuid
from dataclasses import replace
from typing import Any

import pyarrow as pa

from stormproof.core.contract.sink import TaskContext, files_of, transaction_digest
from stormproof.sinks.contract.protocol import CommitDecision, Held, PreparedTransaction, SinkIdentity
from stormproof.sinks.delta import transactional_table as delta_hold
from stormproof.sinks.prepare.staging import prepared_batches
from stormproof.trident.driver import recovery
from stormproof.trident.driver.steps import Steps
from stormproof.trident.ledger.handed_in import HandedIn, HandoutStanding, micro_batch
from stormproof.trident.ledger.tables import Txn
from stormproof.trident.streaming import api, foreach_batch, sinks


def skip_by_number_alone() -> None:
    """A micro-batch whose id is not above the last one's is taken for done, whatever query it is of."""

    def handed(_topology: str, standing: HandoutStanding, query: str, batch: int, *_: object) -> HandedIn:
        last = standing.last
        return micro_batch(query, batch) if last is None or batch > last.batch else last

    for module in (foreach_batch, sinks, api):
        _replace(module, "handed", handed)


def no_previous_check() -> None:
    """A Delta table takes what it is given, whatever it holds, and recovery compares nothing."""
    _replace(recovery, "_agrees", lambda *_: True)

    def decide(_identity: SinkIdentity, _transaction: PreparedTransaction, _held: Held | None) -> CommitDecision:
        return CommitDecision.COMMIT

    _replace(delta_hold, "decide", decide)


def sink_skips_by_number_alone() -> None:
    """A Delta table takes a number that it holds for done, whatever its content."""

    def decide(_identity: SinkIdentity, transaction: PreparedTransaction, held: Held | None) -> CommitDecision:
        return CommitDecision.SKIP if held is not None and held.txid >= transaction.txid else CommitDecision.COMMIT

    _replace(delta_hold, "decide", decide)


def recompute_what_is_prepared() -> None:
    """Recovery computes a prepared batch anew, as Spark would: the same rows with other ids."""

    def roll_forward(steps: Steps, txn: Txn, *_: Any) -> None:
        batch = steps.on_record(txn)
        work = dict(batch.work)
        some = next(w for w in work.values() if w.files)
        folder: str = getattr(steps.sessions[some.sink].writer(), "directory")  # noqa: B009 - of our own writers
        rows = pa.Table.from_batches(list(prepared_batches(folder, some.files)))
        place = rows.schema.get_field_index("id")
        fresh = rows.set_column(place, "id", pa.array([uuid.uuid4().hex for _ in range(len(rows))]))
        for sink, old in work.items():
            task = (
                steps.sessions[sink]
                .writer()
                .open_task(TaskContext(steps.run.incarnation, txn.txid, txn.attempt, 9), fresh.schema)
            )
            for some_rows in fresh.to_batches():
                task.write(some_rows)
            files = files_of(list(task.close()), sink)
            work[sink] = replace(old, files=files, digest=transaction_digest(files))
        batch = replace(batch, work=work)
        steps.finish(batch, steps.settle(batch, steps.commit_sinks(batch)))

    _replace(recovery, "_roll_forward", roll_forward)


def recompute_and_skip_by_number() -> None:
    """Both, and recovery compares nothing."""
    _replace(recovery, "_agrees", lambda *_: True)
    recompute_what_is_prepared()
    sink_skips_by_number_alone()


def _replace(owner: object, name: str, value: object) -> None:
    assert hasattr(owner, name), f"{owner} has no {name} to break"
    setattr(owner, name, value)
