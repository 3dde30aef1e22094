"""Begins a run in its stores: raises the epoch, subscribes to the source, and opens each sink on the table that is its own.

A table is the own of a sink from the first batch on that is prepared for it; then none is made in its place. A new table is
looked at before anything is made or marked, and a topology whose first start is refused is taken back.
Two sinks of a topology never have one table. A run's machines are checked before its first batch, and
again after one of them lacked something.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Mapping
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from typing import Final, cast

from stormproof.core.base.errors import (
    FatalError,
    Fenced,
    PositionMismatch,
    SinkRefused,
    StoreUnavailable,
    StormproofError,
    TransientError,
    UsageError,
)
from stormproof.core.base.failpoint import failpoint
from stormproof.core.base.message import storable_text
from stormproof.core.contract.sink import SinkInput, TableKey, require_tables_apart, shared_table
from stormproof.core.contract.source import Source
from stormproof.core.engine.protocol import Engine
from stormproof.core.graph.plan import Plan
from stormproof.core.heartbeat.listener import HeartbeatListener
from stormproof.core.postgres.database import Database
from stormproof.core.start.preflight import (
    HeartbeatProbe,
    PackageProbe,
    UnpickleProbe,
    marked_places,
    package_fingerprint,
)
from stormproof.core.start.settings import Settings
from stormproof.core.storage.files import files_at
from stormproof.core.storage.protocol import default_storage
from stormproof.sinks.contract.preview import TableAction, TablePreview
from stormproof.sinks.contract.protocol import PROBLEM, Sink, SinkIdentity, SinkProblem, SinkSession, describe_sink
from stormproof.trident.audit.inspect import open_for_inspection
from stormproof.trident.ledger import other_lives, sink_records, txns
from stormproof.trident.ledger.control import signs_of_life
from stormproof.trident.ledger.database import Tx
from stormproof.trident.ledger.graphs import graph_of
from stormproof.trident.ledger.ledger import Ledger, life_now
from stormproof.trident.ledger.sink_records import Bound, SinkBinding
from stormproof.trident.ledger.tables import NO_LIFE, Event, Run
from stormproof.trident.terms.transaction_states import EventKind


@contextmanager
def machine_errors(where: str) -> Generator[None]:
    """Treat an operating system's error on a sink's files (a full disk, a missing right, a failing disk) as an outage.

    It is no verdict on the transaction: nothing is blocked, and the step is tried again.

    Raises:
        StoreUnavailable: instead of the OSError.
    """
    try:
        yield
    except OSError as error:
        raise StoreUnavailable(f"{where}: {type(error).__name__}: {error}; tried again", errno=error.errno) from error


class SinkSessions(dict[str, SinkSession]):
    """Sessions by their sinks' names, in the topology's order.

    They belong to the driver's thread, except while a sink commits a batch: then only the committing thread uses a session.
    An interrupted run ends while that thread goes on, so `close` waits for it: a session that is closed within a commit
    might commit a part.
    """

    def __init__(self) -> None:
        super().__init__()
        self._committing = threading.Lock()
        self._closed = False

    @contextmanager
    def committing(self, sink: str) -> Generator[SinkSession]:
        """A sink's session, for one commit.

        Raises:
            TransientError: the sessions are closed, or about to be; nothing was begun.
            StoreUnavailable: an operating system's error; see `machine_errors`.
        """
        with self._committing:
            if self._closed:
                raise TransientError(f"sink {sink!r} was closed, since the run has ended", sink=sink)
            with machine_errors(f"sink {sink!r}"):
                yield self[sink]

    @property
    def is_committing(self) -> bool:
        """Whether a commit is under way."""
        return self._committing.locked()

    def drop_connections(self) -> None:
        """Wait for the commit that is under way, then close every session's connection; its next use opens another."""
        with self._committing, ExitStack() as stack:
            for session in self.values():
                stack.callback(session.close)

    def close(self) -> None:
        """The same for good. If the wait is interrupted, nothing is closed, and the commit goes on."""
        self._closed = True  # at once: no further sink begins
        self.drop_connections()


log = logging.getLogger("stormproof.start")

NEW_TABLE: Final = "Repair the table, or give the sink another one, and start again"
KNOWN_TABLE: Final = (
    "Repair the table and start again (stormproof status shows what waits for it); or give the sink a new name and a new "
    "table, which begin behind the newest txid"
)


# ---- a start


def placed(plan: Plan, database: Database, settings: Settings) -> Plan:
    """The plan; a sink that names no database or no folder gets that of the settings.

    From now on this process reaches object stores with the settings' options, wherever an address is given none.
    """
    default_storage(lambda: settings.storage_options)
    return replace(plan, sink_specs=tuple(sink.placed(database, settings.staging_address) for sink in sinks_of(plan)))


def sinks_of(plan: Plan) -> tuple[Sink, ...]:
    """A plan's sinks as what they are: the core knows only their specification."""
    return cast("tuple[Sink, ...]", plan.sink_specs)


@contextmanager
def attached(
    plan: Plan,
    source: Source,
    ledger: Ledger,
    database: Database | None = None,
    accept_change: str | None = None,
) -> Generator[tuple[Run, SinkSessions]]:
    """Raise the topology's epoch, subscribe to its source and open its sinks under it; `database` is the ledger's.

    `accept_change` is the fingerprint of a changed graph that is to be taken.

    Where the run raises, the ledger records that it has ended: its process may live on, as a notebook does. Of a topology
    whose first start is refused nothing stays, but for its row where an operator is asked to adopt what is in a table.

    *Not guaranteed*: nothing is recorded where another driver took over, the ledger is away, or a sink still commits after
    a second interrupt.

    Raises:
        TopologyError: two sinks have one table.
        SinkRefused: a table cannot hold its sink's rows.
        PositionMismatch: a table is not the one that the ledger knows, or other lives wrote to it.
        Fenced: another driver raised the epoch meanwhile.
        StoreUnavailable: a store did not answer; may be tried again, under a new epoch.
    """
    require_own_tables(plan)
    new_tables = _look_at_new_tables(plan, ledger, database)
    failpoint("start.before_epoch")
    run = ledger.start(
        plan.topology,
        fingerprint=plan.fingerprint,
        guarantee=plan.guarantee,
        source=source.name,
        graph=graph_of(plan, source.name),
        accept_change=accept_change,
    )
    sessions: SinkSessions | None = None
    try:
        with ExitStack() as stack:
            failpoint("start.after_epoch")
            stack.callback(source.close)
            try:
                for sink, found in new_tables.items():
                    with _refusal_on_record(ledger, run, sink.name), ledger.transaction(run) as tx:
                        other_lives.require_known(tx, sink.name, sink.target, found.other_lives, found.claimed_by)
                sessions = _open_stores(plan, source, ledger, run, stack, database)
            except Fenced as error:
                raise _outrun(ledger, run, error) from error
            except TransientError:
                # A driver that took over has ended our connections: that is Fenced, and not to be tried again.
                with ledger.transaction(run):
                    pass
                raise
            yield run, sessions
    except (Exception, KeyboardInterrupt):
        if sessions is None or not sessions.is_committing:
            with suppress(StormproofError):
                ledger.stop(run)
        raise


def _outrun(ledger: Ledger, run: Run, error: Fenced) -> PositionMismatch:
    """A store knows a newer epoch than this run's, and the ledger does not: the ledger was set back.

    Raises:
        Fenced: the ledger knows it, too: another driver took over.
    """
    with ledger.transaction(run):
        return PositionMismatch(
            f"topology {run.topology!r}: {error.message}. By the ledger epoch {run.epoch} is the newest: the ledger was "
            f"restored from an older backup, or another ledger has this incarnation. Nothing was written. Inspect with: "
            f"stormproof audit verify {run.topology}; then restore the stores to the ledger's moment, or the ledger to "
            f"theirs",
            topology=run.topology,
            ledger=run.epoch,
            **{key: value for key, value in error.details.items() if key != "topology"},
        )


def _look_at_new_tables(plan: Plan, ledger: Ledger, database: Database | None) -> dict[Sink, TablePreview]:
    """Look at the tables of those sinks that no batch was prepared for: nothing is made.

    Raises:
        SinkRefused: one cannot hold its sink's rows.
        StoreUnavailable: a store does not answer.
    """
    with ledger.unfenced() as unfenced:
        life = life_now(unfenced.connection, plan.topology)
        tx = Tx(unfenced.connection, Run(plan.topology, life or NO_LIFE, 0), ledger.clock)
        new = [sink for sink in sinks_of(plan) if sink_records.bound(tx, sink.name) is None]
    found = dict[Sink, TablePreview]()
    for sink in new:
        found[sink] = preview = sink.preview(
            SinkIdentity(plan.topology, tx.run.incarnation, sink.name), plan.sinks[sink.name], database
        )
        if preview.action is TableAction.REFUSE:
            raise _cannot_start(plan.topology, sink.name, SinkRefused(preview.why), NEW_TABLE)
    return found


def _open_stores(
    plan: Plan, source: Source, ledger: Ledger, run: Run, stack: ExitStack, database: Database | None
) -> SinkSessions:
    sessions = stack.enter_context(closing(SinkSessions()))
    with ledger.transaction(run) as tx:
        before = {binding.sink: binding for binding in sink_records.bindings_of(tx.connection, run.incarnation)}
        # Of earlier starts each stopped before its driver was up.
        is_first = txns.next_txid(tx) == 1 and run.incarnation not in signs_of_life(tx.connection)
    try:
        if not is_first:
            source.subscribe(run.incarnation, run.epoch)
        for sink in sinks_of(plan):
            with _refusal_on_record(ledger, run, sink.name):
                session = _open_sink(sink, plan, sessions, ledger, run, database)
            left = before.get(sink.name)
            if left is not None and left.table_id != session.table_id and database is not None:
                _let_go(session.identity, left, database)
        if is_first:  # last, since nobody takes back a subscription in another database than the ledger's
            source.subscribe(run.incarnation, run.epoch)
    except (FatalError, UsageError):
        if is_first:
            _take_back(ledger, run, sessions, before, database)
        raise
    return sessions


def _open_sink(
    sink: Sink, plan: Plan, sessions: SinkSessions, ledger: Ledger, run: Run, database: Database | None
) -> SinkSession:
    with ledger.transaction(run) as tx:
        bound = sink_records.bound(tx, sink.name)
    sessions[sink.name] = session = open_bound(sink, plan.sinks[sink.name], run, bound)
    require_own_stores(plan, sessions)
    with ledger.transaction(run) as tx:
        if bound is None:
            other_lives.require_known(tx, sink.name, sink.target, session.other_incarnations())
            _claim_table(tx, session, sink.target)
        folder = session.writer().files_in()
        if folder is not None:
            with machine_errors(f"sink {sink.name!r}, the folder for its files"):
                files_at(folder).settle_folder(folder, private=True)
        description = describe_sink(sink, plan.sinks[sink.name], files=folder, ledger_database=database)
        sink_records.bind(tx, sink.name, sink.target, session.table_id, description)
    return session


def _let_go(identity: SinkIdentity, left: SinkBinding, database: Database) -> None:
    """Take the claim off a table that was this sink's before any batch was prepared for it, where it still stands."""
    try:
        with closing(open_for_inspection(identity, left, database)) as session:
            if session.table_id == left.table_id and session.held() is None:
                session.release()
    except StormproofError as error:
        log.warning("sink %s: its claim of %s was not taken off: %s", identity.sink, left.target, error.message)


def _take_back(
    ledger: Ledger, run: Run, sessions: SinkSessions, before: Mapping[str, SinkBinding], database: Database | None
) -> None:
    """Remove what a refused first start has left: its claims of tables, and its rows in the ledger.

    *Not guaranteed*: where a store or the ledger is away, or another driver took over, the rest stays; see `forget`.
    """
    for session in sessions.values():
        with suppress(StormproofError):
            session.release()
    for sink in before.keys() - sessions.keys():
        if database is not None:
            _let_go(SinkIdentity(run.topology, run.incarnation, sink), before[sink], database)
    with suppress(StormproofError), ledger.transaction(run) as tx:
        other_lives.remove_topology(tx.connection, run.incarnation)


@contextmanager
def _refusal_on_record(ledger: Ledger, run: Run, sink: str) -> Generator[None]:
    """Record why a start was refused at this sink, so that `status` names it where the driver's own output is not at hand.

    Raises:
        FatalError: what was raised inside, once it is recorded.
        Fenced: another driver took over; nothing is recorded.
    """
    try:
        yield
    except (PositionMismatch, SinkRefused) as error:
        reason = storable_text(error.message)
        with ledger.transaction(run) as tx:
            tx.record([Event(EventKind.START_REFUSED, sink=sink, error=reason, detail={"epoch": run.epoch})])
        raise


def open_bound(sink: Sink, input_: SinkInput, run: Run, bound: Bound | None) -> SinkSession:
    """Open a sink. Where the ledger knows its table (`bound`) none is made: an empty one in its place would hide a loss.

    A driver may die between making a table and binding it; the next one finds that table, and the ledger knows none yet.

    Raises:
        PositionMismatch: the known table is gone, or the sink names another one that is not there.
        SinkRefused: the table cannot hold the rows.
    """
    identity = SinkIdentity(run.topology, run.incarnation, sink.name)
    try:
        # A table in another process's memory is made anew; recovery compares what it holds.
        return sink.open(identity, input_, run.epoch, create=bound is None or sink.is_new_in_process)
    except SinkRefused as error:
        if bound is not None and error.details.get(PROBLEM) == SinkProblem.TABLE_GONE:
            raise bound.is_gone(sink.target) from error
        raise _cannot_start(run.topology, sink.name, error, NEW_TABLE if bound is None else KNOWN_TABLE) from error


def _cannot_start(topology: str, sink: str, error: SinkRefused, way_on: str) -> SinkRefused:
    return SinkRefused(
        f"topology {topology!r} cannot start: {error.message}. Nothing was written. {way_on}",
        **{**error.details, "sink": sink},
    )


def _claim_table(tx: Tx, session: SinkSession, target: str) -> None:
    """Have the table itself record its owner before the ledger binds it: another topology may have its ledger elsewhere.

    Raises:
        PositionMismatch: another life has claimed it first, and may commit to it at any time; nothing was written.
    """
    strangers = session.claim(other_lives.adopted(tx))
    if strangers:
        raise other_lives.unknown(tx.run, session.identity.sink, target, (), strangers, {})


# -- one table, one sink -----------------------------------------------------------------------------------------------


def require_own_tables(plan: Plan) -> None:
    """Refuse two sinks on one table, under whichever names. Each store is asked; nothing is made, and no driver fenced.

    *Not guaranteed*: a sink of your own that cannot tell its table is not compared.

    Raises:
        TopologyError: two sinks have one table.
        StoreUnavailable: a store does not answer.
    """
    if len(plan.sink_specs) > 1:
        require_tables_apart(plan.topology, sinks_of(plan), lambda sink: sink.find_table())


def require_own_stores(plan: Plan, sessions: Mapping[str, SinkSession]) -> None:
    """Refuse two sinks on one key-value store, which only an open session can tell.

    Raises:
        TopologyError: two of these sessions have one store.
    """
    targets = {sink.name: sink.target for sink in plan.sink_specs}
    first: dict[TableKey, str] = {}
    for name, session in sessions.items():
        key = session.store_key
        other = name if key is None else first.setdefault(key, name)
        if other != name:
            raise shared_table(plan.topology, other, name, (targets[other], targets[name]))


class Preflight:
    """Checks in every slot of an engine what each task of this run will need: the package and the user's functions, the
    folders that it writes, the databases that it reads, and the way to the driver.

    `functions` are the topology's, as `stormproof.core.engine.shipping.require_shippable` packed them. `staging` is a
    folder that they need besides those of sinks. With a `listener` tasks report to it.
    """

    def __init__(
        self,
        engine: Engine,
        plan: Plan,
        functions: bytes,
        source: Source,
        staging: str | None = None,
        listener: HeartbeatListener | None = None,
    ) -> None:
        self._engine = engine
        self._source = source
        self._functions = functions
        self._listener = listener
        self._folders = [] if staging is None else [("the staging folder", staging)]
        for spec in plan.sink_specs:
            folder = spec.files_in(plan.sinks[spec.name])
            if folder is not None:
                self._folders.append((f"the folder of sink {spec.name!r}", folder))

    def __call__(self) -> None:
        """Run all checks, as one small job.

        Raises:
            MachineUnfit: a machine cannot run tasks; names it, and what to do. No message was opened.
            MachineUnavailable, StoreUnavailable: something is missing that may come back.
        """
        with ExitStack() as stack:
            folders = stack.enter_context(marked_places(self._folders))
            ways = () if self._listener is None else (HeartbeatProbe(stack.enter_context(self._listener.job()).place),)
            package, functions = PackageProbe(package_fingerprint()), UnpickleProbe(self._functions)
            self._engine.ask((package, functions, *ways, *folders, *self._source.probes()))
