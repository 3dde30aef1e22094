"""The ledger: what every topology opened, prepared, committed and replayed, in one database.

Every transaction first locks its topology's fence row ``for share where epoch = mine``; a driver whose epoch was taken
over stops with `Fenced`. Production runs on Postgres; an SQLite database serves unit tests with the same statements.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import socket
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, cast

import psutil
import sqlalchemy as sa
from sqlalchemy.exc import DBAPIError, IntegrityError, InterfaceError, OperationalError

from stormproof.core.clock import Clock
from stormproof.core.errors import Fenced, Json, PositionMismatch, StoreUnavailable
from stormproof.core.guarantee import Guarantee
from stormproof.core.postgres.database import may_pass
from stormproof.core.sink import files_to_json
from stormproof.core.source.protocol import Expectation, Slice
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger.binding import ACCEPTED_LOSS, Bound, Loss
from stormproof.trident.ledger.graph import ACCEPTED_CHANGE, Change, ChangeKind, Graph, changes, sink_change
from stormproof.trident.ledger.missing import MISSING, Shape, absences, count_missing
from stormproof.trident.ledger.rows import Event, Run, SinkWork, Txn, to_event, to_txn, to_work
from stormproof.trident.transaction import MOVES, AttemptOutcome, EventKind, TxnState

log = logging.getLogger("stormproof.ledger")

TAKE_OVER_LOCK_TIMEOUT_MS: Final = 500
TAKE_OVER_TRIES: Final = 20
READ_ONLY: Final = "25006"
"""SQLSTATE of a write where none is taken."""
LIFE_DIGITS: Final = 8
"""So much of its name's hash stands behind an incarnation that another name has already."""
ADOPTED: Final = "adopted"
"""Reason of an operator's event that lets a topology write beside another life of its name."""
SKIPPED: Final = "skipped"
"""Outcome of a sink's part of a batch that an operator gave up: its rows are rejects, the sink never holds them."""


@dataclass(frozen=True, slots=True)
class DriverIdentity:
    """Which process a driver is: enough to tell whether it still lives, and to end it."""

    host: str
    pid: int
    started: float

    @staticmethod
    def mine() -> DriverIdentity:
        """This process."""
        return DriverIdentity(socket.gethostname(), os.getpid(), psutil.Process().create_time())


@dataclass(frozen=True, slots=True)
class Tx:
    """One open ledger transaction, behind the fence."""

    connection: sa.Connection
    run: Run

    @property
    def raw(self) -> object:
        """The driver's own connection (psycopg's on Postgres), for a source that joins the transaction."""
        return self.connection.connection.driver_connection


class Ledger:
    """One topology's view of the ledger's database.

    Parameters:
        engine: SQLAlchemy engine; its pool should hold one connection.
        clock: for the times in the rows.
        new_incarnation: makes the id of a new life of a topology's name.
    """

    def __init__(self, engine: sa.Engine, clock: Clock, new_incarnation: Callable[[], str]) -> None:
        self._is_postgres = engine.dialect.name == "postgresql"
        # SQLite has no schemas; the unit tests' ledger has the bare names.
        self._engine = engine if self._is_postgres else engine.execution_options(schema_translate_map={t.SCHEMA: None})
        self._clock = clock
        self._new_incarnation = new_incarnation
        self._recorded_backends: set[int] = set()

    # -- a driver's life ---------------------------------------------------------------------------------------------

    def start(
        self,
        topology: str,
        *,
        fingerprint: str,
        guarantee: Guarantee,
        source: str,
        driver: DriverIdentity | None = None,
        graph: Graph | None = None,
    ) -> Run:
        """Raise the topology's epoch, which fences every older driver; make its row where it is new.

        The older epochs' server processes are ended first, since a paused one may hold the fence's lock.

        `graph` is compared with the one that ran last: what changed is recorded, or refused before anybody is fenced.

        Raises:
            StoreUnavailable: the database cannot be reached, or the fence's lock could not be had.
            PositionMismatch: the topology reads another source than the ledger's positions are of, or its graph changed
                in a way that needs a person's word, or while a batch is prepared for what is gone.
        """
        driver = driver or DriverIdentity.mine()
        for _ in range(TAKE_OVER_TRIES):
            self._end_older_backends(topology)
            try:
                with self._begin() as connection:
                    if self._is_postgres:
                        connection.execute(sa.text(f"set local lock_timeout = {TAKE_OVER_LOCK_TIMEOUT_MS}"))
                    run = self._raise_epoch(connection, topology, fingerprint, guarantee, source, driver)
                    found = () if graph is None else self._keep_graph(connection, run, graph)
            except (_LockTimeout, _MadeMeanwhile):
                continue
            self._recorded_backends.clear()
            for change in found:
                if change.is_loud:
                    log.warning("topology %s: %s", topology, change.text)
            return run
        raise StoreUnavailable(
            f"the fence row of topology {topology!r} stays locked by a session that could not be ended; see "
            f"pg_stat_activity and pg_locks for stormproof.topology",
            topology=topology,
        )

    def _raise_epoch(
        self,
        connection: sa.Connection,
        topology: str,
        fingerprint: str,
        guarantee: Guarantee,
        source: str,
        driver: DriverIdentity,
    ) -> Run:
        now = self._clock.now()
        row = connection.execute(
            sa.select(t.topology).where(t.topology.c.name == topology).with_for_update()
        ).one_or_none()
        fields: dict[str, Any] = {
            "fingerprint": fingerprint,
            "guarantee": guarantee.value,
            "source": source,
            "started_at": now,
            "driver_host": driver.host,
            "driver_pid": driver.pid,
            "driver_started": driver.started,
            "stopped_at": None,
        }
        if row is None:
            incarnation = self._life_of(connection, topology)
            first = sa.insert(t.topology).values(
                name=topology, incarnation=incarnation, epoch=1, created_at=now, **fields
            )
            try:
                connection.execute(first)
            except IntegrityError as error:
                if _broken(error) in _MADE_MEANWHILE:
                    raise _MadeMeanwhile from error
                raise
            return Run(topology, incarnation, 1)
        epoch = row.epoch + 1
        connection.execute(sa.update(t.topology).where(t.topology.c.name == topology).values(epoch=epoch, **fields))
        older = None if row.stopped_at is not None else f"{row.driver_host}:{row.driver_pid}"
        run = Run(topology, row.incarnation, epoch, older)
        if older is not None:
            self._insert_events(
                connection,
                run,
                [Event(EventKind.TAKE_OVER, detail={"from": older, "epoch": row.epoch, "to_epoch": epoch})],
            )
        if row.source != source:
            raise PositionMismatch(
                f"topology {topology!r} reads source {row.source!r} by the ledger, and {source!r} by its code; "
                f"its positions belong to the former: give the topology a new name, or the source its old one",
                topology=topology,
                ledger=row.source,
                code=source,
            )
        return run

    def _life_of(self, connection: sa.Connection, topology: str) -> str:
        """A new incarnation. Two functions of one streaming query would have the same: the later one's says whose it is."""
        made = self._new_incarnation()
        is_another = sa.select(t.topology.c.name).where(t.topology.c.incarnation == made)
        if connection.execute(is_another).one_or_none() is None:
            return made
        return f"{made}-{hashlib.sha256(topology.encode()).hexdigest()[:LIFE_DIGITS]}"

    def _keep_graph(self, connection: sa.Connection, run: Run, graph: Graph) -> Sequence[Change]:
        """Record the graph where it is new or changed, and say how; PositionMismatch where the change is refused."""
        of_this = t.graph.c.incarnation == run.incarnation
        earlier = connection.execute(sa.select(t.graph).where(of_this).order_by(t.graph.c.epoch)).all()
        known = earlier[-1] if earlier else None
        if known is not None and known.fingerprint == graph.fingerprint:
            return ()
        after_txid: int = connection.execute(
            sa.select(sa.func.coalesce(sa.func.max(t.txn.c.txid), 0)).where(t.txn.c.incarnation == run.incarnation)
        ).scalar_one()
        found: Sequence[Change] = ()
        if known is not None:
            found = self._told(Tx(connection, run), earlier, graph, after_txid)
            self._require_resolved(connection, run, found)
            self._require_accepted(connection, run, found, graph, known.at)
        connection.execute(
            sa.insert(t.graph).values(
                incarnation=run.incarnation,
                epoch=run.epoch,
                after_txid=after_txid,
                fingerprint=graph.fingerprint,
                description=graph.description,
                at=self._clock.now(),
            )
        )
        self._insert_events(
            connection,
            run,
            [
                Event(
                    EventKind.GRAPH,
                    sink=change.sink,
                    reason=change.kind.value,
                    error=change.text,
                    detail={
                        "after_txid": after_txid,
                        "epoch": run.epoch,
                        **({} if change.missing is None else {MISSING: change.missing.to_json()}),
                    },
                )
                for change in found
            ],
        )
        return found

    def _told(self, tx: Tx, earlier: Sequence[Any], graph: Graph, after_txid: int) -> list[Change]:
        """What changed since the last of the earlier graphs, with what each sink that joins does not have."""
        graphs = [Graph(row.description) for row in earlier]
        shapes = [Shape(row.epoch, row.after_txid, frozenset(g.sinks)) for row, g in zip(earlier, graphs, strict=True)]
        away = absences([*shapes, Shape(tx.run.epoch, after_txid, frozenset(graph.sinks))])
        pruned = self.pruned_upto(tx)
        found: list[Change] = []
        for change in changes(graphs[-1], graph):
            if change.kind is not ChangeKind.SINK_ADDED or change.sink is None:
                found.append(change)
                continue
            sink = change.sink
            missing = next(
                (
                    count_missing(tx.connection, tx.run.incarnation, sink, absence, pruned_upto=pruned)
                    for absence in away[sink]
                    if absence.epoch == tx.run.epoch
                ),
                None,
            )
            held = self.last_held(tx, sink)
            found.append(change.joining(missing, None if held is None else held[0], after_txid))
            before = next((g for g in reversed(graphs) if sink in g.sinks), None)
            other = None if before is None or held is None else sink_change(sink, before, graph)
            found += [] if other is None else [other]
        return found

    def _require_resolved(self, connection: sa.Connection, run: Run, found: Sequence[Change]) -> None:
        """A batch that is prepared for a sink is committed to it as it was prepared, or skipped."""
        touched = {c.sink: c for c in found if c.kind in (ChangeKind.SINK_REMOVED, ChangeKind.SINK_CHANGED)}
        rows = connection.execute(
            sa.select(t.txn_sink.c.txid, t.txn_sink.c.sink)
            .join(t.txn, sa.and_(t.txn.c.incarnation == t.txn_sink.c.incarnation, t.txn.c.txid == t.txn_sink.c.txid))
            .where(
                t.txn.c.incarnation == run.incarnation,
                t.txn.c.state.in_((TxnState.PREPARED.value, TxnState.BLOCKED.value)),
                t.txn_sink.c.sink.in_([sink for sink in touched if sink is not None]),
                t.txn_sink.c.committed_at.is_(None),
                t.txn_sink.c.outcome.is_distinct_from(SKIPPED),
            )
            .order_by(t.txn_sink.c.txid)
        ).all()
        if rows:
            txid, sink = rows[0].txid, rows[0].sink
            raise PositionMismatch(
                f"topology {run.topology!r}: {touched[sink].text}, and txid {txid} is prepared for it"
                f"{f' (and {len(rows) - 1} more)' if len(rows) > 1 else ''}. Run the topology once as it was "
                f"(stormproof run FILE.py:NAME --until-idle), or give those rows up: stormproof ledger skip "
                f"{run.topology} {txid} {sink}",
                topology=run.topology,
                txid=txid,
                sink=sink,
            )

    def _require_accepted(
        self, connection: sa.Connection, run: Run, found: Sequence[Change], graph: Graph, since: datetime
    ) -> None:
        refused = [change for change in found if change.needs_acceptance]
        if not refused:
            return
        accepted = connection.execute(
            sa.select(t.event.c.id)
            .where(
                t.event.c.incarnation == run.incarnation,
                t.event.c.kind == EventKind.OPERATOR.value,
                t.event.c.reason == ACCEPTED_CHANGE,
                t.event.c.message == graph.shown,
                t.event.c.at >= since,
            )
            .limit(1)
        ).one_or_none()
        if accepted is None:
            harm = " and ".join(dict.fromkeys(c.harm for c in refused))
            remedy = " and ".join(dict.fromkeys(c.remedy for c in refused))
            raise PositionMismatch(
                f"topology {run.topology!r} has changed since its last run: {'; '.join(c.text for c in refused)}. "
                f"{harm[0].upper()}{harm[1:]}, and nothing was written. Give the topology, or the sink, a new name and a "
                f"new table; or, {remedy}: stormproof ledger accept-change {run.topology} {graph.shown}",
                topology=run.topology,
                fingerprint=graph.shown,
                sinks=[c.sink for c in refused],
            )

    def _end_older_backends(self, topology: str) -> None:
        if not self._is_postgres:
            return
        with self._begin() as connection:
            connection.execute(
                sa.text(
                    "select pg_terminate_backend(a.pid, 2000) from pg_stat_activity a"
                    " join stormproof.backend b on a.pid = b.pid and a.backend_start = b.started_at"
                    " join stormproof.topology t using (incarnation)"
                    " where t.name = :topology and a.pid <> pg_backend_pid()"
                ),
                {"topology": topology},
            )

    def stop(self, run: Run) -> None:
        """Record that the driver ended in order."""
        with self.transaction(run) as tx:
            tx.connection.execute(
                sa.update(t.topology)
                .where(t.topology.c.name == run.topology, t.topology.c.epoch == run.epoch)
                .values(stopped_at=self._clock.now())
            )

    # -- transactions ------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def transaction(self, run: Run) -> Generator[Tx]:
        """One database transaction that holds the fence row ``for share`` until its end.

        Raises:
            Fenced: another driver has raised the epoch.
            StoreUnavailable: the connection was lost; at a lost COMMIT answer the outcome is unknown: read again.
        """
        self._record_backend(run)
        with self._begin() as connection:
            epoch = connection.execute(
                sa.select(t.topology.c.epoch)
                .where(
                    t.topology.c.name == run.topology,
                    t.topology.c.incarnation == run.incarnation,
                    t.topology.c.epoch == run.epoch,
                )
                .with_for_update(read=True)
            ).scalar_one_or_none()
            if epoch is None:
                self._raise_fenced(connection, run)
            yield Tx(connection, run)

    @contextlib.contextmanager
    def unfenced(self) -> Generator[sa.Connection]:
        """One database transaction behind no fence: for what an operator decides of a store that several topologies read.

        Raises:
            StoreUnavailable: the connection was lost, or a lock was not to be had.
        """
        with self._begin() as connection:
            yield connection

    def _raise_fenced(self, connection: sa.Connection, run: Run) -> None:
        row = connection.execute(sa.select(t.topology).where(t.topology.c.name == run.topology)).one_or_none()
        by = (
            "was removed from the ledger"
            if row is None
            else f"is run by {row.driver_host}:{row.driver_pid} with epoch {row.epoch}"
        )
        raise Fenced(
            f"topology {run.topology!r} {by} now; this driver's epoch {run.epoch} is over and it stops",
            topology=run.topology,
            epoch=run.epoch,
            current=None if row is None else row.epoch,
        )

    def _record_backend(self, run: Run) -> None:
        """Note this connection's server process, in a transaction of its own, so that a take-over can end it."""
        if not self._is_postgres:
            return
        with self._begin() as connection:
            driver = cast(Any, connection.connection.driver_connection)
            pid: int = driver.info.backend_pid
            if pid in self._recorded_backends:
                return
            connection.execute(
                sa.text(
                    "insert into stormproof.backend (incarnation, pid, started_at, epoch)"
                    " select :incarnation, pid, backend_start, :epoch from pg_stat_activity where pid = pg_backend_pid()"
                    " on conflict do nothing"
                ),
                {"incarnation": run.incarnation, "epoch": run.epoch},
            )
            connection.execute(
                sa.text("delete from stormproof.backend where incarnation = :incarnation and epoch < :epoch"),
                {"incarnation": run.incarnation, "epoch": run.epoch},
            )
        self._recorded_backends.add(pid)

    @contextlib.contextmanager
    def _begin(self) -> Generator[sa.Connection]:
        try:
            with self._engine.begin() as connection:
                yield connection
        except DBAPIError as error:
            sqlstate = getattr(error.orig, "sqlstate", None)
            if sqlstate == READ_ONLY:
                raise StoreUnavailable(
                    "the ledger's database takes no writes (default_transaction_read_only is on there, or it is a standby): "
                    f"{_first_line(error.orig)}; let it take writes, or name another one in STORMPROOF_DATABASE_URL",
                    sqlstate=sqlstate,
                ) from error
            if sqlstate == "55P03":
                raise _LockTimeout(
                    "another session of the ledger's database holds a lock for too long; see pg_locks",
                    sqlstate=sqlstate,
                ) from error
            if (
                error.connection_invalidated
                or isinstance(error, OperationalError | InterfaceError)
                or may_pass(error.orig)
            ):
                self._recorded_backends.clear()
                raise StoreUnavailable(
                    f"the ledger's database does not answer ({type(error.orig).__name__}: {_first_line(error.orig)})",
                    sqlstate=sqlstate,
                ) from error
            raise

    # -- a batch's steps ---------------------------------------------------------------------------------------------

    def next_txid(self, tx: Tx) -> int:
        """The number after the highest; aborted numbers are gaps, never used again."""
        highest = tx.connection.execute(
            sa.select(sa.func.max(t.txn.c.txid)).where(t.txn.c.incarnation == tx.run.incarnation)
        ).scalar_one()
        return 1 if highest is None else int(highest) + 1

    def open(
        self,
        tx: Tx,
        txid: int,
        guarantee: Guarantee,
        source: str,
        slice_: Slice,
        seed: int,
        tuning: Mapping[str, Json] | None = None,
    ) -> None:
        """Record a batch and its first attempt; `tuning` is how batches are to be at present."""
        now = self._clock.now()
        tx.connection.execute(
            sa.insert(t.txn).values(
                incarnation=tx.run.incarnation,
                txid=txid,
                state=TxnState.OPEN.value,
                guarantee=guarantee.value,
                epoch=tx.run.epoch,
                attempt=1,
                source=source,
                position=slice_.position,
                messages=slice_.expected.messages,
                bytes=slice_.bytes,
                retry=slice_.retry,
                opened_at=now,
                tuning=tuning,
            )
        )
        self._insert_attempt(tx, txid, 1, seed, frozenset(), slice_.expected)

    def add_attempt(
        self, tx: Tx, txid: int, attempt: int, seed: int, excluded: frozenset[int], expected: Expectation
    ) -> None:
        """Record a further attempt, before its job runs."""
        self._update_txn(tx, txid, TxnState.OPEN, attempt=attempt)
        self._insert_attempt(tx, txid, attempt, seed, excluded, expected)

    def _insert_attempt(
        self, tx: Tx, txid: int, attempt: int, seed: int, excluded: frozenset[int], expected: Expectation
    ) -> None:
        tx.connection.execute(
            sa.insert(t.attempt).values(
                incarnation=tx.run.incarnation,
                txid=txid,
                attempt=attempt,
                epoch=tx.run.epoch,
                seed=seed,
                excluded=sorted(excluded),
                expected_messages=expected.messages,
                expected_xor=expected.xor,
                started_at=self._clock.now(),
                outcome=AttemptOutcome.RUNNING.value,
            )
        )

    def end_attempt(self, tx: Tx, txid: int, attempt: int, outcome: AttemptOutcome, error: str | None = None) -> None:
        """Record how an attempt ended."""
        tx.connection.execute(
            sa.update(t.attempt)
            .where(
                t.attempt.c.incarnation == tx.run.incarnation, t.attempt.c.txid == txid, t.attempt.c.attempt == attempt
            )
            .values(outcome=outcome.value, error=error)
        )
        if error is not None:
            self.record(
                tx, [Event(EventKind.ATTEMPT_FAILED, txid=txid, attempt=attempt, reason=outcome.value, error=error)]
            )

    def fix_content(
        self, tx: Tx, txid: int, attempt: int, work: Sequence[SinkWork], failures: Sequence[Event], tuples: int
    ) -> None:
        """Record what a batch writes and which of its messages failed; from here on its content cannot change."""
        self.end_attempt(tx, txid, attempt, AttemptOutcome.COMPLETE)
        tx.connection.execute(
            sa.insert(t.txn_sink),
            [
                {
                    "incarnation": tx.run.incarnation,
                    "txid": txid,
                    "sink": w.sink,
                    "previous": w.previous,
                    "rows": w.rows,
                    "bytes": w.bytes,
                    "digest": w.digest,
                    "files": files_to_json(w.files),
                }
                for w in work
            ],
        )
        self.record(tx, failures)
        self._update_txn(tx, txid, TxnState.OPEN, **counts_of(failures), tuples=tuples, prepared_at=self._clock.now())

    def move(self, tx: Tx, txid: int, before: TxnState, after: TxnState, **values: Json) -> None:
        """Change a batch's state; only as `MOVES` allows, and only if it still is `before`."""
        assert after in MOVES[before], (before, after)
        ended: dict[str, Any] = {"ended_at": self._clock.now()} if after.ended else {}
        self._update_txn(tx, txid, before, state=after.value, **ended, **values)

    def _update_txn(self, tx: Tx, txid: int, before: TxnState, **values: Any) -> None:
        changed = tx.connection.execute(
            sa.update(t.txn)
            .where(t.txn.c.incarnation == tx.run.incarnation, t.txn.c.txid == txid, t.txn.c.state == before.value)
            .values(**values)
        ).rowcount
        if changed != 1:
            raise Fenced(
                f"txid {txid} of topology {tx.run.topology!r} is not {before} any more: another driver moved it",
                topology=tx.run.topology,
                txid=txid,
            )

    def sinks_hold(self, tx: Tx, txid: int, outcomes: Mapping[str, str]) -> None:
        """Record that these sinks hold the batch, and how each commit ended."""
        for sink, outcome in outcomes.items():
            tx.connection.execute(
                sa.update(t.txn_sink)
                .where(
                    t.txn_sink.c.incarnation == tx.run.incarnation, t.txn_sink.c.txid == txid, t.txn_sink.c.sink == sink
                )
                .values(committed_at=self._clock.now(), outcome=outcome)
            )

    def record(self, tx: Tx, events: Iterable[Event]) -> None:
        """Append events."""
        self._insert_events(tx.connection, tx.run, events)

    def _insert_events(self, connection: sa.Connection, run: Run, events: Iterable[Event]) -> None:
        now = self._clock.now()
        rows = [
            {
                "incarnation": run.incarnation,
                "at": now,
                "kind": e.kind.value,
                "txid": e.txid,
                "attempt": e.attempt,
                "sink": e.sink,
                "message": e.message,
                "number": e.number,
                "origin": e.origin,
                "token": e.token,
                "reason": e.reason,
                "component": e.component,
                "error": e.error,
                "input": e.input,
                "detail": e.detail,
            }
            for e in events
        ]
        if rows:
            connection.execute(sa.insert(t.event), rows)

    # -- sinks -------------------------------------------------------------------------------------------------------

    def bind_sink(
        self, tx: Tx, sink: str, target: str, table_id: str, description: dict[str, Json] | None = None
    ) -> None:
        """Remember which table is behind a sink, and how the audit can open it again by name alone.

        Raises:
            PositionMismatch: the ledger knows another table there: see `Bound.is_another`.
        """
        known = self._sink_row(tx, sink)
        if known is None:
            tx.connection.execute(
                sa.insert(t.topology_sink).values(
                    incarnation=tx.run.incarnation,
                    sink=sink,
                    target=target,
                    table_id=table_id,
                    description=description,
                    first_at=self._clock.now(),
                )
            )
        elif known.table_id != table_id:
            raise self._bound(tx, known).is_another(target, table_id)
        elif description is not None and (known.description != description or known.target != target):
            # The same table under another path or another schema: the next inspection needs the present one.
            tx.connection.execute(
                sa.update(t.topology_sink)
                .where(t.topology_sink.c.incarnation == tx.run.incarnation, t.topology_sink.c.sink == sink)
                .values(target=target, description=description)
            )

    def rebind_sink(self, tx: Tx, sink: str, table_id: str, *, by: str, why: str, loss: Loss | None = None) -> None:
        """Take the table that is there now for the sink's, by a person's word, and record what is given up with it."""
        known = self.bound(tx, sink)
        tx.connection.execute(
            sa.update(t.topology_sink)
            .where(t.topology_sink.c.incarnation == tx.run.incarnation, t.topology_sink.c.sink == sink)
            .values(table_id=table_id)
        )
        was = None if known is None else known.table_id
        detail: dict[str, Json] = {"action": "adopt_table", "by": by, "why": why, "was": was, "is": table_id}
        self.record(tx, [Event(EventKind.OPERATOR, sink=sink, reason=f"adopt table by {by}", detail=detail)])
        if loss is not None:
            self.record(tx, [Event(EventKind.OPERATOR, sink=sink, reason=ACCEPTED_LOSS, detail=loss.detail())])

    def given_up(self, tx: Tx, sink: str) -> int:
        """Up to which txid a person gave up what the sink's table lacks; 0 where nobody did."""
        details = tx.connection.execute(
            sa.select(t.event.c.detail).where(
                t.event.c.incarnation == tx.run.incarnation,
                t.event.c.kind == EventKind.OPERATOR.value,
                t.event.c.reason == ACCEPTED_LOSS,
                t.event.c.sink == sink,
            )
        ).scalars()
        return max((Loss.of(detail).upto for detail in details), default=0)

    def rows_held(self, tx: Tx, sink: str) -> dict[int, int]:
        """How many rows each txid wrote that the sink is known to hold, as far as the ledger still has them."""
        rows = tx.connection.execute(
            sa.select(t.txn_sink.c.txid, t.txn_sink.c.rows).where(
                t.txn_sink.c.incarnation == tx.run.incarnation,
                t.txn_sink.c.sink == sink,
                t.txn_sink.c.committed_at.is_not(None),
            )
        )
        return {row.txid: row.rows for row in rows}

    def bound(self, tx: Tx, sink: str) -> Bound | None:
        """The table behind a sink of this incarnation; None where the sink was never used."""
        row = self._sink_row(tx, sink)
        return None if row is None else self._bound(tx, row)

    def _bound(self, tx: Tx, row: Any) -> Bound:
        held = self.last_held(tx, row.sink)
        return Bound(tx.run.topology, row.sink, row.target, row.table_id, None if held is None else held[0])

    def _sink_row(self, tx: Tx, sink: str) -> Any:
        return tx.connection.execute(
            sa.select(t.topology_sink).where(
                t.topology_sink.c.incarnation == tx.run.incarnation, t.topology_sink.c.sink == sink
            )
        ).one_or_none()

    def require_known_lives(self, tx: Tx, sink: str, target: str, others: Sequence[str]) -> None:
        """Refuse a table that other lives wrote to, unless an operator adopted them.

        One of this topology's name means that the ledger was lost and made anew; one of another topology, that this one
        was renamed, or that two share a table. A renamed topology reads its source from the start and would double it all.

        Raises:
            PositionMismatch: names the lives, and the command that goes on all the same.
        """
        adopted = self.adopted_lives(tx)
        unknown = [other for other in others if other not in adopted]
        if unknown:
            life = unknown[0]
            known = f"(it has {tx.run.topology}/{tx.run.incarnation})"
            why = (
                f"of topology {life.partition('/')[0]!r} {known}: this topology is that one under a new name, and would "
                "read its source from the start and write it all again, or two topologies share the table"
                if "/" in life
                else f"of incarnation {life}, which this ledger does not know {known}: the ledger was lost and made anew, "
                "or the table belongs to another ledger"
            )
            raise PositionMismatch(
                f"sink {sink!r} of topology {tx.run.topology!r}: {target} holds transactions {why}. Nothing was written. "
                f"Use another table or the old name; or, to write beside what is there: stormproof ledger adopt "
                f"{tx.run.topology} {life}",
                sink=sink,
                unknown=[*unknown],
                ledger=tx.run.incarnation,
            )

    def adopted_lives(self, tx: Tx) -> frozenset[str]:
        """The other lives beside whose rows an operator lets this topology write."""
        return frozenset(
            tx.connection.execute(
                sa.select(t.event.c.message).where(
                    t.event.c.incarnation == tx.run.incarnation,
                    t.event.c.kind == EventKind.OPERATOR.value,
                    t.event.c.reason == ADOPTED,
                )
            ).scalars()
        )

    def unbind_sink(self, tx: Tx, sink: str, *, by: str, why: str) -> None:
        """Forget the table behind a sink that never held a txid: the next start binds the one that it finds."""
        known = self._sink_row(tx, sink)
        tx.connection.execute(
            sa.delete(t.topology_sink).where(
                t.topology_sink.c.incarnation == tx.run.incarnation, t.topology_sink.c.sink == sink
            )
        )
        was = None if known is None else known.table_id
        detail: dict[str, Json] = {"action": "release_table", "by": by, "why": why, "was": was}
        self.record(tx, [Event(EventKind.OPERATOR, sink=sink, reason=f"release table by {by}", detail=detail)])

    def last_held(self, tx: Tx, sink: str) -> tuple[int, str] | None:
        """The highest txid that a sink is known to hold, with its digest: PREV for the next one."""
        row = tx.connection.execute(
            sa.select(t.txn_sink.c.txid, t.txn_sink.c.digest)
            .where(
                t.txn_sink.c.incarnation == tx.run.incarnation,
                t.txn_sink.c.sink == sink,
                t.txn_sink.c.committed_at.is_not(None),
            )
            .order_by(t.txn_sink.c.txid.desc())
            .limit(1)
        ).one_or_none()
        return None if row is None else (row.txid, row.digest)

    # -- reading -----------------------------------------------------------------------------------------------------

    def unresolved(self, tx: Tx) -> list[Txn]:
        """Batches without an end, in txid order."""
        rows = tx.connection.execute(
            sa.select(t.txn)
            .where(t.txn.c.incarnation == tx.run.incarnation, t.txn.c.ended_at.is_(None))
            .order_by(t.txn.c.txid)
        )
        return [to_txn(row) for row in rows]

    def txn(self, tx: Tx, txid: int) -> Txn | None:
        """One batch."""
        row = tx.connection.execute(
            sa.select(t.txn).where(t.txn.c.incarnation == tx.run.incarnation, t.txn.c.txid == txid)
        ).one_or_none()
        return None if row is None else to_txn(row)

    def work(self, tx: Tx, txid: int) -> dict[str, SinkWork]:
        """What a batch writes, by sink; empty before its content was fixed."""
        rows = tx.connection.execute(
            sa.select(t.txn_sink).where(t.txn_sink.c.incarnation == tx.run.incarnation, t.txn_sink.c.txid == txid)
        )
        return {row.sink: to_work(row) for row in rows}

    def owed_work(self, tx: Tx, txid: int) -> tuple[dict[str, SinkWork], bool]:
        """What a batch still writes, by sink, and whether it has any such row at all: skipped sinks are left out."""
        work = self.work(tx, txid)
        return {sink: item for sink, item in work.items() if item.outcome != SKIPPED}, bool(work)

    def last_committed(self, tx: Tx, limit: int) -> list[tuple[int, SinkWork]]:
        """What the last committed batches wrote, newest first, for each sink that holds it."""
        rows = tx.connection.execute(
            sa.select(t.txn_sink)
            .where(
                t.txn_sink.c.incarnation == tx.run.incarnation,
                t.txn_sink.c.committed_at.is_not(None),
                t.txn_sink.c.txid.in_(
                    sa.select(t.txn.c.txid)
                    .where(t.txn.c.incarnation == tx.run.incarnation, t.txn.c.state == TxnState.COMMITTED.value)
                    .order_by(t.txn.c.txid.desc())
                    .limit(limit)
                ),
            )
            .order_by(t.txn_sink.c.txid.desc())
        )
        return [(row.txid, to_work(row)) for row in rows]

    def failures(self, tx: Tx, txid: int) -> list[Event]:
        """The messages that failed in a batch, or were returned, in whichever attempt; recorded once, at its end."""
        rows = tx.connection.execute(
            sa.select(t.event)
            .where(
                t.event.c.incarnation == tx.run.incarnation,
                t.event.c.txid == txid,
                t.event.c.kind.in_((EventKind.FAILURE.value, EventKind.RETURNED.value)),
            )
            .order_by(t.event.c.id)
        )
        return [to_event(row) for row in rows]

    def blocking_sink(self, tx: Tx, txid: int) -> str | None:
        """The sink at which a batch was blocked last."""
        return tx.connection.execute(
            sa.select(t.event.c.sink)
            .where(
                t.event.c.incarnation == tx.run.incarnation,
                t.event.c.txid == txid,
                t.event.c.kind == EventKind.BLOCKED.value,
            )
            .order_by(t.event.c.id.desc())
            .limit(1)
        ).scalar_one_or_none()

    def dead_letters_in(self, tx: Tx, txid: int) -> list[str]:
        """The messages that became dead letters with a batch, as far as that is recorded."""
        rows = tx.connection.execute(
            sa.select(t.event.c.message).where(
                t.event.c.incarnation == tx.run.incarnation,
                t.event.c.txid == txid,
                t.event.c.kind == EventKind.DEAD_LETTER.value,
            )
        )
        return [str(message) for message in rows.scalars()]

    def unfinished_work(self, tx: Tx, sink: str) -> list[tuple[int, str]]:
        """(txid, digest) of batches whose content was fixed, which were given up, and which the sink may hold all the same.

        Those that ended without it, under at-least-once and at-most-once; and those for which it was skipped.
        """
        rows = tx.connection.execute(
            sa.select(t.txn_sink.c.txid, t.txn_sink.c.digest)
            .join(t.txn, sa.and_(t.txn.c.incarnation == t.txn_sink.c.incarnation, t.txn.c.txid == t.txn_sink.c.txid))
            .where(
                t.txn_sink.c.incarnation == tx.run.incarnation,
                t.txn_sink.c.sink == sink,
                t.txn_sink.c.committed_at.is_(None),
                sa.or_(
                    t.txn.c.state.in_((TxnState.ABORTED.value, TxnState.ABANDONED.value)),
                    t.txn_sink.c.outcome == SKIPPED,
                ),
            )
            .order_by(t.txn_sink.c.txid)
        )
        return [(row.txid, row.digest) for row in rows]

    def pruned_upto(self, tx: Tx) -> int:
        """Up to which txid the record was cut; 0 where it never was."""
        return int(
            tx.connection.execute(
                sa.select(sa.func.coalesce(sa.func.max(t.prune.c.upto), 0)).where(
                    t.prune.c.incarnation == tx.run.incarnation
                )
            ).scalar_one()
        )

    def live_attempts(self, tx: Tx) -> tuple[int, frozenset[tuple[int, int]]]:
        """The highest txid, and the (txid, attempt) pairs whose files a sink may hold or may still come to hold."""
        rows = tx.connection.execute(
            sa.select(t.txn.c.txid, t.txn.c.attempt).where(
                t.txn.c.incarnation == tx.run.incarnation,
                sa.exists().where(t.txn_sink.c.incarnation == t.txn.c.incarnation, t.txn_sink.c.txid == t.txn.c.txid),
            )
        )
        live = frozenset((row.txid, row.attempt) for row in rows)
        return self.next_txid(tx) - 1, live

    def drop_connections(self) -> None:
        """Let the connections go; the next transaction makes one anew. SQLite's in memory is the database, and stays."""
        self._recorded_backends.clear()
        if self._is_postgres:
            self._engine.dispose()

    def close(self) -> None:
        """Let the connection go."""
        self._engine.dispose()


def counts_of(failures: Sequence[Event]) -> dict[str, int]:
    """How many of these are failures, and how many messages that were merely returned, by column of `txn`."""
    failed = sum(event.kind is EventKind.FAILURE for event in failures)
    return {"failed": failed, "returned": len(failures) - failed}


class _LockTimeout(StoreUnavailable):
    """A lock was not to be had in time."""


class _MadeMeanwhile(Exception):
    """Another driver started the topology for the first time, or another one of the same query, at the same instant."""


_MADE_MEANWHILE: Final = ("pk_topology", "uq_topology_incarnation")
"""The constraints that such a driver makes an insert break. Any other one is broken by what this driver writes."""


def _broken(error: IntegrityError) -> str | None:
    """The name of the constraint that a statement broke. SQLite names its columns alone."""
    named = getattr(getattr(error.orig, "diag", None), "constraint_name", None)
    if named is not None:
        return str(named)
    by_columns = {"topology.name": "pk_topology", "topology.incarnation": "uq_topology_incarnation"}
    return by_columns.get(str(error.orig).removeprefix("UNIQUE constraint failed: "))


def _first_line(error: object) -> str:
    text = str(error).strip()
    return text.splitlines()[0] if text else ""


def memory_ledger_engine() -> sa.Engine:
    """An SQLite database in memory with the ledger's tables, for unit tests."""
    engine = sa.create_engine("sqlite://", poolclass=sa.pool.StaticPool, connect_args={"check_same_thread": False})
    with engine.execution_options(schema_translate_map={t.SCHEMA: None}).begin() as connection:
        t.metadata.create_all(connection)
    return engine
