"""Canaries of dead letters and of rejects, over a topology whose driver runs elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypedDict, Unpack

from stormproof.core.clock import Clock, SystemClock
from stormproof.core.errors import UsageError
from stormproof.trident.audit.status import DriverState, driver_state
from stormproof.trident.decisions import dead_letters
from stormproof.trident.decisions import rejects as decisions
from stormproof.trident.decisions.canary import CanaryReport, CanaryRules, Fate, run_canary
from stormproof.trident.decisions.letters import Letters, letters_of
from stormproof.trident.ledger import control, rejects
from stormproof.trident.ledger.rows import Reject

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
    ids: Sequence[str],
    rules: CanaryRules,
    *,
    by: str,
    why: str,
    **watched: Unpack[Watched],
) -> CanaryReport:
    """Requeue dead letters wave by wave; see `run_canary`. Each wave is on record with who, why, and its number.

    Raises:
        UsageError: no driver runs that takes messages, so no wave would be decided; nothing was handed out.
    """

    def release(letters: Letters, some: Sequence[str], said: str) -> Sequence[str]:
        return dead_letters.dispose(stores, letters, some, requeue=True, by=by, why=said).done

    return _in_waves(stores, topology, ids, rules, release, by=by, why=why, **watched)


def retry_canary(
    stores: Stores,
    topology: str,
    found: Sequence[Reject],
    rules: CanaryRules,
    *,
    by: str,
    why: str,
    **watched: Unpack[Watched],
) -> CanaryReport:
    """Retry rejects wave by wave, as `requeue_canary` does dead letters. A message that several sinks rejected counts once.

    Raises:
        UsageError: no driver runs that takes messages, so no wave would be decided; nothing was handed out.
    """
    of_message: dict[str, list[Reject]] = {}
    for one in found:
        if one.message is not None:
            of_message.setdefault(one.message, []).append(one)

    def release(letters: Letters, some: Sequence[str], said: str) -> Sequence[str]:
        del letters
        mine = [one for message in some for one in of_message[message]]
        done = decisions.decide(stores, topology, mine, retry=True, by=by, why=said)
        return list(dict.fromkeys(one.message for one in done.done if one.message is not None))

    return _in_waves(stores, topology, list(of_message), rules, release, by=by, why=why, **watched)


def _in_waves(
    stores: Stores,
    topology: str,
    ids: Sequence[str],
    rules: CanaryRules,
    release: Callable[[Letters, Sequence[str], str], Sequence[str]],
    *,
    by: str,
    why: str,
    **watched: Unpack[Watched],
) -> CanaryReport:
    """Run a canary. `release` hands some messages out, with what is said of them on record, and returns those it could."""
    require_driver(stores, topology)
    with letters_of(stores, topology) as letters:
        fates = _Fates(stores, topology, letters)

        def released(some: Sequence[str], wave: int) -> Sequence[str]:
            fates.mark()
            return release(letters, some, f"{why or 'no reason given'} (canary, wave {wave}: {len(some)})")

        return run_canary(
            topology,
            ids,
            rules,
            by=by,
            release=released,
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
