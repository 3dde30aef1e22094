"""Decisions about a topology's running driver: pause, resume, drain and stop, requested through the ledger."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from stormproof.core.base.errors import UsageError
from stormproof.trident.audit.evidence import place_of
from stormproof.trident.audit.status import DriverState, driver_state
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.declarations.decisions import DecisionPreview
from stormproof.trident.ledger import control, handed_in
from stormproof.trident.ledger.control import Control, Doing, SignOfLife
from stormproof.trident.terms.transaction_states import OperatorAction

if TYPE_CHECKING:
    from stormproof.trident.audit.ledger import TopologyRow

ANSWER_S: Final = 5.0
"""A driver hears within some two seconds; one that has not by then does not answer."""
_LOOK_EVERY_S: Final = 0.1
_GONE: Final = (DriverState.STOPPED, DriverState.DEAD)


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What became of a request. `doing` is what the driver does now, by its newest sign of life."""

    topology: str
    action: str
    by: str
    why: str
    driver: str
    """``host:process`` of the driver that it went to; empty where none runs."""
    heard: bool
    done: bool
    """Paused with nothing in flight, running again, or ended."""
    doing: str | None
    in_flight: int
    last_sign_s: float | None = None
    """How old the driver's newest sign of life is; None: there is none."""
    recorded: bool = True
    """Off where all was so already: nothing was asked then."""

    wait_s: float | None = None
    """How long its effect was waited for."""

    @property
    def exit_status(self) -> int:
        """4: a driver runs and did not take note in time, and does so once it is back; 1: it did not do as asked in time."""
        if self.driver and not self.heard:
            return 4
        return 0 if self.done or self.wait_s is None else 1

    def lines(self) -> list[str]:
        """What became of the request, for people."""
        return [_answer(self)]


@dataclass(frozen=True, slots=True)
class _DriverState:
    row: TopologyRow
    control: Control | None
    sign: SignOfLife | None

    @property
    def is_gone(self) -> bool:
        return driver_state(self.row) in _GONE

    @property
    def is_paused(self) -> bool:
        return self.control is not None and self.control.paused

    @property
    def ended_since_it_heard(self) -> bool:
        """Whether the driver heard what was asked last, and has ended in order since: one that is to end when it is idle."""
        heard = None if self.control is None else self.control.heard_epoch
        return self.row.stopped_at is not None and heard == self.row.epoch

    def is_done(self, action: OperatorAction, epoch: int) -> bool:
        if self.row.epoch != epoch or self.is_gone:
            return action is not OperatorAction.RESUME or self.ended_since_it_heard
        doing = None if self.sign is None else self.sign.doing
        match action:
            case OperatorAction.PAUSE:
                return doing == Doing.PAUSED
            case OperatorAction.RESUME:
                return doing not in (Doing.PAUSED, Doing.PAUSING)
            case _:
                return False


def ask_driver(
    stores: Stores,
    topology: str,
    action: OperatorAction,
    *,
    by: str,
    why: str,
    wait_s: float | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> RequestResult:
    """Ask a topology's driver for something, and see whether it heard; wait for its effect for at most `wait_s` seconds.

    `told` gets a line before anything is waited for. Where all is so already, nothing is asked, and nothing recorded.

    Raises:
        UsageError: nothing that runs can be asked for this: there is no driver, or it is one that takes no requests.
    """
    row = stores.topology(topology)
    seen = _seen(stores, topology)
    runs = not seen.is_gone
    _refuse(stores, seen, action)
    if _is_so_already(seen, action):
        return RequestResult(
            topology=topology,
            action=action.value,
            by=by,
            why=why,
            driver="",
            heard=False,
            done=True,
            doing=None,
            in_flight=0,
            recorded=False,
            wait_s=wait_s,
        )
    with stores.transaction(row) as tx:
        request = control.ask(tx, action, by=by, why=why)
    if runs:
        told(f"asked the driver of {topology!r} ({row.driver_host}:{row.driver_pid}) to {action.value} ...")
        seen = _until(stores, topology, ANSWER_S, lambda now: _has_heard(now, request, row.epoch))
        if wait_s is not None:
            seen = _until(stores, topology, wait_s, lambda now: now.is_done(action, row.epoch))
    return RequestResult(
        topology,
        action.value,
        by,
        why,
        f"{row.driver_host}:{row.driver_pid}" if runs else "",
        runs and _has_heard(seen, request, row.epoch),
        seen.is_done(action, row.epoch),
        None if seen.sign is None or seen.is_gone else seen.sign.doing,
        0 if seen.sign is None or seen.is_gone else seen.sign.in_flight,
        None if seen.sign is None else seen.sign.age_s,
        wait_s=wait_s,
    )


_ALREADY: Final = {
    OperatorAction.RESUME: "It is not paused: there is nothing to resume.",
    OperatorAction.STOP: "No driver of it runs: there is nothing to stop.",
}


def look(stores: Stores, topology: str, action: OperatorAction) -> DecisionPreview:
    """The driver that would be asked.

    Raises:
        UsageError: as `ask_driver`.
    """
    seen = _seen(stores, topology)
    _refuse(stores, seen, action)
    row = seen.row
    return DecisionPreview(
        {"driver": f"{row.driver_host}:{row.driver_pid}, {driver_state(row).value}", "run": f"epoch {row.epoch}"},
        nothing=_ALREADY[action] if _is_so_already(seen, action) else None,
    )


def _seen(stores: Stores, topology: str) -> _DriverState:
    with stores.audit.snapshot() as snapshot:
        row = snapshot.topology(topology)
        sign = control.signs_of_life(snapshot.connection).get(row.incarnation)
        asked = control.control_of(snapshot.connection, row.incarnation)
    return _DriverState(row, asked, sign if sign is not None and sign.epoch == row.epoch else None)


def _refuse(stores: Stores, seen: _DriverState, action: OperatorAction) -> None:
    name = seen.row.name
    with stores.audit.snapshot() as snapshot:
        is_fed = place_of(snapshot.connection, seen.row.incarnation) is not None
        has_keys = handed_in.summary(snapshot.connection, seen.row.incarnation) is not None
    if is_fed or has_keys:
        whose = "a streaming query" if is_fed else "a program of its own"
        raise UsageError(
            f"topology {name!r} is fed by {whose}, which opens its batches: stop or pause that one", topology=name
        )
    if action is OperatorAction.DRAIN and seen.is_gone:
        raise UsageError(
            f"no driver of topology {name!r} runs, so nothing is drained: run it with --until-idle", topology=name
        )
    if action is OperatorAction.DRAIN and seen.is_paused:
        raise UsageError(
            f"topology {name!r} is paused, so nothing would be drained; first: stormproof resume {name}", topology=name
        )


def _is_so_already(seen: _DriverState, action: OperatorAction) -> bool:
    """Whether there is nothing to ask for, so that it may be repeated by a script."""
    if action is OperatorAction.RESUME:
        return not seen.is_paused
    return action is OperatorAction.STOP and seen.is_gone


def _has_heard(seen: _DriverState, request: int, epoch: int) -> bool:
    asked = seen.control
    if asked is None or asked.request > request:
        return True  # a later request says more
    return asked.heard_epoch is not None and asked.heard_epoch >= epoch


def _until(stores: Stores, topology: str, seconds: float, holds: Callable[[_DriverState], bool]) -> _DriverState:
    end_s = time.monotonic() + seconds
    while True:
        seen = _seen(stores, topology)
        if holds(seen) or seen.is_gone or time.monotonic() >= end_s:
            return seen
        time.sleep(_LOOK_EVERY_S)


def _answer(asked: RequestResult) -> str:
    name = asked.topology
    if not asked.driver:
        so_already = {
            OperatorAction.RESUME.value: "is not paused",
            OperatorAction.STOP.value: "has no driver that runs",
        }
        if not asked.recorded:
            return f"{name} {so_already[asked.action]}"
        if asked.action == OperatorAction.PAUSE.value:
            return f"{name}: no driver runs; the next one opens no batch until: stormproof resume {name}"
        return f"{name}: no driver runs; the next one opens batches again"
    if not asked.heard:
        age = "none yet" if asked.last_sign_s is None else f"{asked.last_sign_s:.0f} s old"
        return (
            f"{name}: the driver {asked.driver} does not answer (its newest sign of life: {age}). The request stays: it "
            "does as asked once it is back"
        )
    if asked.done:
        if asked.action == OperatorAction.PAUSE.value:
            return f"{name} is paused, with nothing in flight; it goes on after: stormproof resume {name}"
        if asked.action == OperatorAction.RESUME.value:
            return f"{name} opens batches again"
        return f"{name}: the driver {asked.driver} has ended"
    return f"{name}: the driver {asked.driver} has heard; {asked.doing or 'running'}, {asked.in_flight} in flight"
