"""Canaries of dead letters, over a topology whose driver runs elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

from stormproof.core.clock import Clock, SystemClock
from stormproof.core.errors import UsageError
from stormproof.trident.audit.status import DriverState, driver_state
from stormproof.trident.decisions import dead_letters
from stormproof.trident.decisions.canary import CanaryReport, CanaryRules, Fate, run_canary
from stormproof.trident.decisions.letters import ChosenLetters, Letters, letters_of
from stormproof.trident.ledger import control, rejects

if TYPE_CHECKING:
    from stormproof.trident.stores import Stores

_NO_DRIVER = (DriverState.STOPPED, DriverState.DEAD)


def _nothing(report: CanaryReport) -> None:
    del report


class Watched(TypedDict, total=False):
    """How a canary waits: by which clock, who is told of each change, and who may stop it."""

    clock: Clock
    told: Callable[[CanaryReport], None]
    stopped: Callable[[], bool]


def requeue_canary(
    stores: Stores,
    topology: str,
    chosen: ChosenLetters,
    rules: CanaryRules,
    *,
    by: str,
    why: str,
    **watched: Unpack[Watched],
) -> CanaryReport:
    """Requeue dead letters wave by wave; see `run_canary`. Each wave is on record with who, why, and its number.

    A message that several sinks rejected counts once.

    Raises:
        UsageError: no driver runs that takes messages, so no wave would be decided; nothing was handed out.
    """
    require_driver(stores, topology)
    with letters_of(stores, topology) as letters:
        fates = _Fates(stores, topology, letters)

        def release(some: Sequence[str], wave: int) -> Sequence[str]:
            fates.mark()
            said = f"{why or 'no reason given'} (canary, wave {wave}: {len(some)})"
            return dead_letters.dispose(stores, letters, chosen.of(some), requeue=True, by=by, why=said).messages

        return run_canary(
            topology,
            chosen.messages,
            rules,
            by=by,
            release=release,
            fates=fates,
            trouble=lambda: driver_trouble(stores, topology),
            clock=watched.get("clock") or SystemClock(),
            told=watched.get("told", _nothing),
            stopped=watched.get("stopped", lambda: False),
        )


def require_driver(stores: Stores, topology: str) -> None:
    """Raise UsageError unless a driver of the topology runs, and is not told to open nothing."""
    reason = driver_trouble(stores, topology)
    if reason is not None:
        raise UsageError(
            f"a canary waits for what becomes of its first messages, and {reason}: start or resume it first, or hand some "
            "out without a canary",
            topology=topology,
        )


def driver_trouble(stores: Stores, topology: str) -> str | None:
    """Why a topology processes nothing now; None: its driver runs."""
    with stores.audit.snapshot() as snapshot:
        row = snapshot.topology(topology)
        asked = control.control_of(snapshot.connection, row.incarnation)
        blocked = [txn.txid for txn in snapshot.unresolved(row.incarnation) if txn.state.value == "blocked"]
    if blocked:
        return f"txid {blocked[0]} of {topology!r} is blocked"
    if driver_state(row) in _NO_DRIVER:
        return f"no driver of {topology!r} runs"
    if asked is not None and asked.paused:
        return f"{topology!r} is paused"
    return None


class _Fates:
    """What became of messages since the last mark.

    The pending store is read before the rejects: a reject is recorded in the transaction that confirms its message.
    """

    def __init__(self, stores: Stores, topology: str, letters: Letters) -> None:
        self._stores = stores
        self._incarnation = stores.topology(topology).incarnation
        self._letters = letters
        self._after = 0

    def mark(self) -> None:
        """Rejects from here on are new."""
        with self._stores.audit.snapshot() as snapshot:
            self._after = rejects.newest(snapshot.connection, self._incarnation)

    def __call__(self, messages: Sequence[str]) -> Mapping[str, Fate]:
        unconfirmed = self._letters.unconfirmed(messages)
        with self._stores.audit.snapshot() as snapshot:
            rejected = rejects.newer(snapshot.connection, self._incarnation, messages, self._after)
        return {
            one: Fate.FAILED
            if one in rejected or unconfirmed.get(one)
            else Fate.WAITING
            if one in unconfirmed
            else Fate.PASSED
            for one in messages
        }
