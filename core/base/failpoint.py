"""Named failpoints: places where a test can kill, pause or fail a run.

Off unless the environment variable ``STORMPROOF_FAILPOINT`` names one with an action: ``NAME=ACTION`` or
``NAME=ACTION@K`` for the K-th time that the place is reached (default 1), several joined by ``;``. Actions:

``kill``   SIGKILL to this process; in a Spark worker, to the driver (its pid stands in ``STORMPROOF_DRIVER_PID``)
``worker`` SIGKILL to this process, also in a Spark worker
``pause``  SIGSTOP to this process, until another sends SIGCONT
``raise``  `FailpointReached`, which is a `TransientError`
``error``  `FailpointError`, which is no `StormproofError`, as from a broken task or a bug

Where ``STORMPROOF_FAILPOINT_LOG`` names a file, each place that is reached appends its name to it.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from stormproof.core.base.errors import TransientError

ENV: Final = "STORMPROOF_FAILPOINT"
ENV_LOG: Final = "STORMPROOF_FAILPOINT_LOG"
ENV_DRIVER_PID: Final = "STORMPROOF_DRIVER_PID"
ACTIONS: Final = ("kill", "worker", "pause", "raise", "error")


@dataclass(frozen=True, slots=True)
class Failpoint:
    """One place. `scope` says which runs reach it, so that a test matrix knows its cells.

    ``every`` batch; a ``recovery`` that finds something; an ``abort``; a ``retry`` of a job; a ``delta`` or ``postgres``
    sink; a ``state``; a micro-batch of a ``stream``; the ``queue`` itself; the ``journal`` of a server that redelivers; an
    ``operator``'s decision about a dead letter; an ``audit``; a ``reject`` of a row that a sink's table refuses; a refused
    row of a ``group``; the ``upkeep`` of a table's files; a confirm that is ``owed``, since the source is not in the
    ledger's database.
    """

    name: str
    about: str
    scope: str = "every"


_ALL: Final = (
    Failpoint("start.before_epoch", "before the topology's epoch is raised"),
    Failpoint("start.after_epoch", "the epoch is raised, no sink is opened yet"),
    Failpoint("recover.before", "before the first step of recovery"),
    Failpoint("recover.after_each", "one unfinished transaction is ended, the next is not", "recovery"),
    Failpoint("recover.after", "after recovery, before the first batch"),
    Failpoint("open.before", "before a batch is opened"),
    Failpoint("open.in_transaction", "messages are leased and the txid recorded, not committed"),
    Failpoint("open.after", "the txid is open, no job has run"),
    Failpoint("attempt.after", "another attempt is recorded, its job has not run", "retry"),
    Failpoint("task.after_file", "a task's files are synced, its summary is not sent"),
    Failpoint("run.after", "the job is done, its verdict is not taken"),
    Failpoint("prepare.before", "before the prepare transaction"),
    Failpoint("prepare.in_transaction", "everything is recorded, not committed"),
    Failpoint("prepare.after", "the content is fixed; no sink was touched"),
    Failpoint("commit.before_sink", "before a sink's commit"),
    Failpoint("commit.after_sink", "after a sink's commit"),
    Failpoint("recount.after", "the batch's rows are recorded anew, the sink is not asked again", "group"),
    Failpoint("delta.after_check", "the sink's last txid and the files are checked, no log entry is put", "delta"),
    Failpoint("delta.after_log_entry", "the log entry is put, not synced, no answer given", "delta"),
    Failpoint("delta.after_sync", "files and log entry are synced", "delta"),
    Failpoint("compact.before", "a Delta table is about to be compacted", "upkeep"),
    Failpoint("compact.after_log_entry", "a compaction's log entry is put, not synced", "upkeep"),
    Failpoint("compact.after_sync", "a compaction's files and log entry are synced", "upkeep"),
    Failpoint("repair.before", "the faults of a Delta table are found, nothing is written", "upkeep"),
    Failpoint("repair.after_files", "a repair's files are synced, no log entry is put", "upkeep"),
    Failpoint("repair.after_log_entry", "a repair's log entry is put, no answer given", "upkeep"),
    Failpoint("repair.after_sync", "a repair's files and log entry are synced", "upkeep"),
    Failpoint("postgres.after_guard", "in the sink's transaction: fence and guard row are locked", "postgres"),
    Failpoint("postgres.after_rows", "in the sink's transaction: every row is written", "postgres"),
    Failpoint(
        "postgres.after_rejects",
        "in the sink's transaction: all rows but the refused ones are written",
        "reject",
    ),
    Failpoint("postgres.after_commit", "the sink's transaction is committed, no answer given", "postgres"),
    Failpoint("state.after_begin", "a state has begun a txid, none of its rows is written", "state"),
    Failpoint("state.after_rows", "every row was given to the state, its commit was not called", "state"),
    Failpoint("state.after_commit", "the state has committed, no answer given", "state"),
    Failpoint("finish.before", "every sink has committed; the source has not confirmed"),
    Failpoint("finish.in_transaction", "the source has confirmed, `committed` is not recorded"),
    Failpoint("finish.before_commit", "`committed` is recorded, the transaction is not committed"),
    Failpoint("finish.before_confirm", "the txid is committed, the source has not confirmed", "owed"),
    Failpoint("finish.after", "the txid is committed, staging files still lie there"),
    Failpoint("abort.in_transaction", "a batch is recorded as aborted, not yet committed", "abort"),
    Failpoint("abort.after", "a batch was aborted", "abort"),
    Failpoint("sweep.before_unlink", "a dead attempt's file is about to be removed", "recovery"),
    Failpoint("stream.before_register", "a micro-batch's rows are synced, and are no messages yet", "stream"),
    Failpoint("stream.in_transaction", "its rows are messages, not committed", "stream"),
    Failpoint("stream.after_register", "its rows are committed messages, none is opened", "stream"),
    Failpoint("queue.put.before_commit", "messages are copied in, not yet committed", "queue"),
    Failpoint("audit.after_ledger", "the ledger and the source are read, no sink", "audit"),
    Failpoint("audit.in_sink", "a Postgres sink's evidence is read, not its guard", "audit"),
    Failpoint("audit.after_sinks", "every sink is read, the ledger not again", "audit"),
    Failpoint("queue.drop.after_lock", "a partition is locked and checked, about to be dropped", "queue"),
    Failpoint("journal.in_transaction", "what a server delivered is recorded, not committed", "journal"),
    Failpoint("journal.after_write", "it is committed, not opened, not confirmed", "journal"),
    Failpoint("journal.before_acknowledge", "slices are confirmed here, not at their server", "journal"),
    Failpoint("journal.after_acknowledge", "the server has heard, the journal still owes it", "journal"),
    Failpoint("dead_letter.in_transaction", "a decision is recorded, not committed", "operator"),
    Failpoint("dead_letter.after", "an edited dead letter waits, no answer given", "operator"),
)
FAILPOINTS: Final = {point.name: point for point in _ALL}


class FailpointReached(TransientError):
    """A failpoint with the action ``raise`` was reached."""


class FailpointError(RuntimeError):
    """A failpoint with the action ``error`` was reached."""


class _State:
    """The failpoints that are armed in this process, and how often each place was reached."""

    def __init__(self) -> None:
        self.source: str | None = None
        self.armed: dict[str, tuple[str, int]] = {}
        self.reached: dict[str, int] = {}
        self.watcher: Callable[[str], None] | None = None
        self.lock = threading.Lock()


_state = _State()


@contextmanager
def armed(text: str) -> Generator[None]:
    """Arm failpoints in this process, counting from here, and disarm them at the end."""
    parse(text)
    before = os.environ.get(ENV)
    _state.source = None
    os.environ[ENV] = text
    try:
        yield
    finally:
        os.environ.pop(ENV)
        if before is not None:
            os.environ[ENV] = before
        _state.source = None


@contextmanager
def watched(watcher: Callable[[str], None]) -> Generator[None]:
    """Call `watcher` with the name of each place that is reached in this process, before the place's failpoint acts. What it
    raises is raised there. For simulations, whose seed decides where a driver ends.
    """
    before, _state.watcher = _state.watcher, watcher
    try:
        yield
    finally:
        _state.watcher = before


def parse(text: str) -> dict[str, tuple[str, int]]:
    """Read ``NAME=ACTION@K;...``; an unknown name or action is an error that lists the known ones."""
    armed: dict[str, tuple[str, int]] = {}
    for part in filter(None, (p.strip() for p in text.split(";"))):
        name, _, action = part.partition("=")
        action, _, count = action.partition("@")
        if name not in FAILPOINTS:
            raise ValueError(f"{ENV}: no failpoint {name!r}; known: {', '.join(sorted(FAILPOINTS))}")
        if action not in ACTIONS:
            raise ValueError(f"{ENV}: no action {action!r} for {name}; known: {', '.join(ACTIONS)}")
        armed[name] = (action, int(count) if count else 1)
    return armed


def failpoint(name: str) -> None:
    """Mark a place. Costs two dictionary look-ups where no failpoint is armed.

    Raises:
        FailpointReached: where this place is armed with ``raise``.
        KeyError: where the name is not in `FAILPOINTS`.
    """
    if _state.watcher is not None:
        _state.watcher(FAILPOINTS[name].name)
    log = os.environ.get(ENV_LOG)
    text = os.environ.get(ENV)
    if log is None and not text:
        return
    point = FAILPOINTS[name]
    if log is not None:
        fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        os.write(fd, f"{point.name}\n".encode())
        os.close(fd)
    if not text:
        return
    with _state.lock:
        if text != _state.source:  # newly armed, so counting begins here
            _state.source, _state.armed = text, parse(text)
            _state.reached.clear()
        if name not in _state.armed:
            return
        action, at = _state.armed[name]
        _state.reached[name] = _state.reached.get(name, 0) + 1
        if _state.reached[name] != at:
            return
    match action:
        case "kill":
            driver = os.environ.get(ENV_DRIVER_PID)
            os.kill(int(driver) if driver else os.getpid(), signal.SIGKILL)
        case "worker":
            os.kill(os.getpid(), signal.SIGKILL)
        case "pause":
            # To this thread: if another thread took the signal, this one would go on until the whole process is stopped.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case "error":
            raise FailpointError(f"failpoint {name}")
        case _:
            raise FailpointReached(f"failpoint {name}", failpoint=name)
