"""What was shown to a person before a confirmation: acted on as it was shown, and at most once."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import QueryParams

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import StormproofError, UsageError
from stormproof.core.base.message import storable_text
from stormproof.trident.declarations.decisions import Decision, Field

if TYPE_CHECKING:
    from stormproof.trident.decisions.dead_letters import CanaryReport
    from stormproof.trident.declarations.decisions import Look
    from stormproof.trident.web.decide.letters import CanaryRun


VALUE_MAX = 4_000
"""Characters of a field's value; an edited payload may have more."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What a decision is about. `values` has each field that is filled in; `missing` says which are, and must be."""

    topology: str
    values: Mapping[str, Any]
    missing: tuple[str, ...] = ()

    @staticmethod
    def of(decision: Decision, topology: str, params: QueryParams) -> Choice:
        """What an address, or a form, chooses.

        Raises:
            UsageError: a value is not of its kind.
        """
        values = values_of(decision.choice, params)
        return Choice(topology, values, missing_of(decision.choice, values))

    def text(self, name: str) -> str | None:
        """A value as the form and the address have it."""
        value = self.values.get(name)
        return None if value is None else "1" if value is True else str(value)


@dataclass(frozen=True, slots=True)
class Given:
    """What was filled in with the confirmation: who, why, and the decision's own fields."""

    by: str
    why: str
    values: Mapping[str, Any]

    @staticmethod
    def of(decision: Decision, by: str, form: QueryParams) -> Given:
        """From a form; texts are made storable, as those of the command line are."""
        who, why = (storable_text(text.strip()[:VALUE_MAX]) for text in (by, form.get("why", "")))
        return Given(who, why, values_of(decision.given, form))


def values_of(fields: Sequence[Field], params: QueryParams) -> dict[str, Any]:
    """The values of the fields that are filled in, and of those that have a default.

    Raises:
        UsageError: one is not of its kind.
    """
    found = {one.name: _value(one, params) for one in fields}
    return {name: value for name, value in found.items() if value is not None}


def missing_of(fields: Sequence[Field], values: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels of the fields that must be filled in and are not."""
    return tuple(one.label for one in fields if one.required and one.name not in values)


def _value(one: Field, params: QueryParams) -> Any:
    text = params.get(one.name, "")
    if one.kind == "payload":
        return params.get(one.name)
    if one.kind == "texts":
        return tuple(dict.fromkeys(each.strip() for each in params.getlist(one.name) if each.strip()))
    if one.kind == "checkbox":
        return bool(text.strip())
    if not text.strip():
        return one.default
    return text.strip() if one.kind == "text" else _number(one, text.strip())


def _number(one: Field, text: str) -> int | float:
    try:
        if len(text) <= 18:
            return int(text) if one.kind == "number" else float(text)
    except ValueError:
        pass
    raise UsageError(f"{one.label}: {text[:40]!r} is no number")


_log: Final = logging.getLogger("stormproof.web")


class RunningCanary:
    """One canary. If the page's process ends, it stops where it is: what was handed out stays so, the rest is untouched."""

    def __init__(self, run: CanaryRun) -> None:
        self._run = run
        self._stop = threading.Event()
        self._ended = threading.Event()
        self.report: CanaryReport | None = None
        """The newest state."""
        self.error: str | None = None
        """Why it failed."""
        self._thread = threading.Thread(target=self._work, name="canary", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        """Whether it goes on."""
        return not self._ended.is_set()

    def stop(self) -> None:
        """Have it hand out no further wave."""
        self._stop.set()

    def wait(self, seconds: float) -> bool:
        """Wait for its end; whether it has ended."""
        return self._ended.wait(seconds)

    def _work(self) -> None:
        try:
            self.report = self._run.run(self._told, self._stop.is_set)
        except StormproofError as error:
            self.error = error.message
        except Exception:  # noqa: BLE001 - the thread's outermost frame: the page shows it, the log says why
            self.error = "it failed unexpectedly; the page's log says why"
            _log.exception("a canary failed")
        finally:
            self._ended.set()

    def _told(self, report: CanaryReport) -> None:
        self.report = report


KEPT_S: Final = 3_600.0
"""A confirmation may come so long after it was asked for."""
KEPT_MAX: Final = 500
PINNED_MAX: Final = 1_000_000
"""Messages that all proposals together may hold; the oldest proposals go first."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a confirmed decision. `ok` is off where it was refused, or something of it."""

    lines: tuple[str, ...]
    ok: bool
    by: str
    canary: RunningCanary | None = None


@dataclass(slots=True)
class Proposal:
    """One decision that was shown, for the one person or session `holder`."""

    nonce: str
    holder: str
    action: Decision
    choice: Choice
    look: Look
    at_s: float
    outcome: Outcome | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def once(self, do: Callable[[], Outcome]) -> Outcome:
        """Run it, unless it was run; a second call waits for the first one's outcome, and gets that."""
        with self._lock:
            if self.outcome is None:
                try:
                    self.outcome = do()
                except BaseException:
                    self.outcome = Outcome(
                        (
                            "It failed unexpectedly, and may be done in part: see what is on record, and the page's log.",
                        ),
                        False,
                        "",
                    )
                    raise
            return self.outcome


class Proposals:
    """The proposals of one page, in this process's memory; that one was acted on is recorded in the ledger, with its effect.

    Guarantee: a proposal is acted on at most once, however often its form is sent, to whichever process of a page, and only
    for its holder.
    """

    def __init__(self, clock: Clock, make: Callable[[], str]) -> None:
        self._clock = clock
        self._make = make
        self._lock = threading.Lock()
        self._kept: OrderedDict[str, Proposal] = OrderedDict()

    def add(self, holder: str, action: Decision, choice: Choice, look: Look) -> Proposal:
        """Keep what is being shown."""
        now_s = self._clock.monotonic_s()
        made = Proposal(self._make(), holder, action, choice, look, now_s)
        with self._lock:
            self._kept[made.nonce] = made
            held = sum(_size(one) for one in self._kept.values())
            for nonce, one in list(self._kept.items()):
                too_old = now_s - one.at_s >= KEPT_S
                if one is made or (not too_old and len(self._kept) <= KEPT_MAX and held <= PINNED_MAX):
                    continue
                if one.outcome is not None and one.outcome.canary is not None and one.outcome.canary.is_running:
                    continue
                held -= _size(one)
                del self._kept[nonce]
        return made

    def find(self, nonce: str, holder: str) -> Proposal | None:
        """A proposal of this holder's; None if there is none (any more)."""
        with self._lock:
            found = self._kept.get(nonce)
        return found if found is not None and found.holder == holder else None

    def running(self) -> list[Proposal]:
        """Those whose canaries go on."""
        with self._lock:
            kept = list(self._kept.values())
        return [one for one in kept if one.outcome and one.outcome.canary and one.outcome.canary.is_running]

    def close(self) -> None:
        """Have canaries hand out no further wave."""
        for one in self.running():
            assert one.outcome is not None
            assert one.outcome.canary is not None
            one.outcome.canary.stop()


def _size(one: Proposal) -> int:
    return max(one.look.count or 1, 1) if one.look.fixed and one.outcome is None else 1
