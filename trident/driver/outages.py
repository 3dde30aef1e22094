"""How a run outlasts outages: a step is tried again until its stores answer, within the time that a run allows."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, TypeVar

import tenacity

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import StoreUnavailable, TransientError
from stormproof.trident.driver.options import RunOptions

log = logging.getLogger("stormproof.txn")
R = TypeVar("R")
_DOUBLINGS_MAX: Final = 32


class _Budget:
    """The time that stores were away since the last progress.

    The time between a successful recovery and the next outage is not spent, since the stores answered then. Before any
    other transient error (a lease that runs out, a job that never starts) it is spent: otherwise such an error, which
    returns after each recovery, would be retried without end.
    """

    def __init__(self, options: RunOptions, clock: Clock) -> None:
        self._outage_s = options.outage_s
        self._backoff = (options.backoff_base_s, options.backoff_max_s)
        self._clock = clock
        self._spent_s = 0.0
        self._away_since_s: float | None = None
        self._answered_at_s: float | None = None
        self._tries_before = 0
        self.tries = 0
        """Tries since the last progress."""

    def failed(self, state: tenacity.RetryCallState) -> None:
        """Note a failure: from here on the stores are away."""
        now_s = self._clock.monotonic_s()
        error = None if state.outcome is None else state.outcome.exception()
        if self._answered_at_s is not None and not isinstance(error, StoreUnavailable):
            self._spent_s += now_s - self._answered_at_s
        if self._away_since_s is None:
            self._away_since_s = now_s
        self._answered_at_s = None
        self.tries = state.attempt_number - self._tries_before

    def answered(self, tries: int, *, progress: bool) -> None:
        """Note a successful recovery; with progress the budget begins anew."""
        now_s = self._clock.monotonic_s()
        if self._away_since_s is not None:
            self._spent_s += now_s - self._away_since_s
        self._away_since_s, self._answered_at_s = None, now_s
        if progress:
            self._spent_s, self._tries_before = 0.0, tries

    @property
    def is_spent(self) -> bool:
        """Whether the stores have been away for as long as allowed."""
        away_s = 0.0 if self._away_since_s is None else self._clock.monotonic_s() - self._away_since_s
        return self._spent_s + away_s >= self._outage_s

    def wait_s(self, state: tenacity.RetryCallState) -> float:
        """How long to wait before the next try: exponential in the tries since the last progress."""
        base_s, max_s = self._backoff
        doublings = min(state.attempt_number - self._tries_before - 1, _DOUBLINGS_MAX)
        return float(min(max_s, base_s * 2**doublings))


def outlasting_outages(
    step: Callable[[], R],
    options: RunOptions,
    clock: Clock,
    stopping: Callable[[], bool] = lambda: False,
    *,
    let_go: Callable[[], None] | None = None,
    recover: Callable[[], bool] | None = None,
) -> R:
    """Call `step` until it raises no transient error, with exponential backoff.

    Before each further try `let_go` drops every connection, since one outage makes all of them stale, and `recover` finds
    out what was decided; it returns whether it made progress (a batch was committed).

    The budget is `outage_s` seconds of stores that are away, from the first failure on. It begins anew with progress, and
    after a successful recovery only the next outage itself counts: the time of a long step that fails because a store is
    away does not.

    Raises:
        TransientError: the last one, once the budget is spent or `stopping` returns true.
    """
    budget = _Budget(options, clock)
    attempts = 0

    def attempt() -> R:
        nonlocal attempts
        attempts += 1
        if attempts > 1:
            if let_go is not None:
                let_go()
            if recover is not None:
                budget.answered(attempts - 1, progress=recover())
        return step()

    def given_up(state: tenacity.RetryCallState) -> bool:
        budget.failed(state)
        return budget.is_spent or stopping()

    retrying = tenacity.Retrying(
        retry=tenacity.retry_if_exception_type(TransientError),
        wait=budget.wait_s,
        stop=given_up,
        sleep=clock.sleep,
        before_sleep=lambda state: _log_outage(state, budget),
        reraise=True,
    )
    return retrying(attempt)


def _log_outage(state: tenacity.RetryCallState, budget: _Budget) -> None:
    error = state.outcome.exception() if state.outcome is not None else None
    log.warning("try %d failed, recovering: %s", budget.tries, error)
