"""What was shown to a person before a confirmation: acted on as it was shown, and at most once.

Of dead letters: one, those selected, or all that match, at once or by a canary, which goes on after the answer.
"""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from starlette.datastructures import QueryParams

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import StormproofError, UsageError
from stormproof.core.base.message import storable_text
from stormproof.core.source.files.rows import editable
from stormproof.trident.decisions import dead_letters
from stormproof.trident.decisions.canary import CanaryReport, CanaryRules, requeue_canary, require_driver
from stormproof.trident.decisions.letter_choice import ChosenLetters, LetterFilter, filter_of, letters_of
from stormproof.trident.declarations.decisions import Decision, DecisionPreview, Field
from stormproof.trident.terms.wording import counted

if TYPE_CHECKING:
    from stormproof.trident.decisions.stores import Stores

VALUE_MAX = 4_000
"""Characters of a field's value; an edited payload may have more."""


@dataclass(frozen=True, slots=True)
class DecisionSubject:
    """What a decision is about. `values` has each field that is filled in; `missing` says which are, and must be."""

    topology: str
    values: Mapping[str, Any]
    missing: tuple[str, ...] = ()

    @staticmethod
    def of(decision: Decision, topology: str, params: QueryParams) -> DecisionSubject:
        """What an address, or a form, chooses.

        Raises:
            UsageError: a value is not of its kind.
        """
        values = values_of(decision.choice, params)
        return DecisionSubject(topology, values, missing_of(decision.choice, values))

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
class DecisionOutcome:
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
    choice: DecisionSubject
    look: DecisionPreview
    at_s: float
    outcome: DecisionOutcome | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def once(self, do: Callable[[], DecisionOutcome]) -> DecisionOutcome:
        """Run it, unless it was run; a second call waits for the first one's outcome, and gets that."""
        with self._lock:
            if self.outcome is None:
                try:
                    self.outcome = do()
                except BaseException:
                    self.outcome = DecisionOutcome(
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

    def add(self, holder: str, action: Decision, choice: DecisionSubject, look: DecisionPreview) -> Proposal:
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


# ---- decisions about dead letters


@dataclass(frozen=True, slots=True)
class CanaryRun:
    """A canary to be run in a thread of its own: it gets a listener, and what says that it is to stop."""

    run: Callable[[Callable[[CanaryReport], None], Callable[[], bool]], CanaryReport]


@dataclass(frozen=True, slots=True)
class Done:
    """What was done, in sentences; the exit status is 1 where something of it was refused."""

    told: tuple[str, ...]
    exit_status: int = 0
    canary: CanaryRun | None = None
    """A canary that has begun, and goes on."""

    def lines(self) -> Sequence[str]:
        """What was done, for people."""
        return self.told


def look(stores: Stores, topology: str, *, id: tuple[str, ...], all: bool, **filters: object) -> DecisionPreview:
    """Which dead letters are meant: those selected, those that a filter admits, or expressly all of them."""
    where = filter_of(**filters)
    stores.topology(topology)
    nothing = require_chosen(id, is_empty=(where.without_sink if id else where).is_empty, every=all)
    if nothing is not None:
        return DecisionPreview({}, nothing=nothing)
    found = _found(stores, topology, where, id)
    classes = [(one.error_class, one.reason, one.component, str(one.undecided)) for one in found.classes]
    missed = len(set(id).difference(found.messages))
    at_sinks = len(found.rejects)
    return DecisionPreview(
        {},
        found.number,
        "dead letter",
        {"chosen": found},
        (
            *((f"{missed} of those selected are decided about already",) if missed else ()),
            *((f"{at_sinks} of them only at the sinks that rejected them",) if at_sinks else ()),
        ),
        (("error class", "reason", "failed in", "dead letters"), *classes),
        None if found.number else "No undecided dead letter is chosen.",
    )


def require_chosen(ids: Sequence[str], *, is_empty: bool, every: bool) -> str | None:
    """Why nothing is chosen; None: something is. An empty filter must be confirmed by choosing all.

    Raises:
        UsageError: more than one of selected, filter, and all.
    """
    chosen = (bool(ids), not is_empty, every)
    if sum(chosen) > 1:
        raise UsageError("choose messages, or a filter, or all of them: only one of these")
    return None if any(chosen) else "Nothing is chosen yet: fill in a filter, or check “All of them”."


def _found(stores: Stores, topology: str, where: LetterFilter, ids: Sequence[str]) -> ChosenLetters:
    with letters_of(stores, topology) as letters:
        return letters.choose(where, ids)


def drop(
    stores: Stores,
    topology: str,
    *,
    id: tuple[str, ...],
    all: bool,
    chosen: ChosenLetters,
    by: str,
    why: str,
    requeue: bool = False,
    **filters: object,
) -> Done:
    """Drop, or requeue, those that were shown; what changed since is told."""
    told = changes(chosen.keys, _found(stores, topology, filter_of(**filters), id).keys)
    with letters_of(stores, topology) as letters:
        done = dead_letters.dispose(stores, letters, chosen, requeue=requeue, by=by, why=why)
    refused = [f"{message}: {reason}" for message, reason in done.refused.items()]
    return Done((*done.lines(), *told, *refused), 1 if refused else 0)


def requeue(
    stores: Stores,
    topology: str,
    *,
    chosen: ChosenLetters,
    by: str,
    why: str,
    canary: int | None = None,
    max_failures: float | None = None,
    wait_s: float | None = None,
    **about: Any,
) -> Done:
    """Requeue those that were shown; with a canary the first ones alone, and the others behind the page."""
    rules = CanaryRules.of(canary, max_failures, wait_s)
    if rules is None:
        return drop(stores, topology, chosen=chosen, by=by, why=why, requeue=True, **about)
    require_driver(stores, topology)
    run = CanaryRun(
        lambda told, stopped: requeue_canary(
            *(stores, topology, chosen, rules), by=by, why=why, told=told, stopped=stopped
        )
    )
    return Done((f"{topology}: a canary of {chosen.number} dead letters has begun",), canary=run)


def changes(before: Set[str | int], now: Set[str | int]) -> list[str]:
    """What changed since somebody looked."""
    found = list[str]()
    if gone := len(before - now):
        was = "was" if gone == 1 else "were"
        found.append(
            f"since you looked, {counted(gone, 'dead letter')} of these {was} decided about by others: left alone"
        )
    if new := len(now - before):
        found.append(f"since you looked, {counted(new, 'dead letter')} more came to match: not touched")
    return found


# -- edit --------------------------------------------------------------------------------------------------------------


def look_at_one(stores: Stores, topology: str, id: str) -> DecisionPreview:
    """One dead letter, with its payload as the text of a form."""
    with letters_of(stores, topology) as letters:
        one = dead_letters.undecided_letter(letters, id)
    payload = editable(one.payload or b"")
    text = text_to_edit(payload)
    facts = {"message": id, "failed": f"{one.times_failed} times", "dead since": str(one.dead_at)}
    if text is None:
        why = "The payload is no text that a form of a browser keeps byte by byte. Edit it by the command below."
        return DecisionPreview(facts, 1, "dead letter", nothing=why)
    said = f"the payload has {len(payload)} bytes; the error was: {one.error}"
    return DecisionPreview(facts, 1, "dead letter", {"before": payload}, (said,), prefilled={"payload": text})


def edit(
    stores: Stores, topology: str, id: str, *, before: bytes, payload: str, by: str, why: str
) -> dead_letters.Edited:
    """Hand it out again with the payload of the form."""
    with letters_of(stores, topology) as letters:
        one = dead_letters.undecided_letter(letters, id)
        new = edited_bytes(before, payload)
        return dead_letters.edit(stores, letters, one, new, exact=True, by=by, why=why)


def text_to_edit(payload: bytes) -> str | None:
    """A payload as the text of a form's field; None if a browser would change it."""
    try:
        text = payload.decode("utf-8")
    except UnicodeDecodeError:
        return None
    lone = text.replace("\r\n", "\n")
    ends_mixed = "\r\n" in text and lone.replace("\n", "\r\n") != text
    hidden = any(ord(character) < 32 and character not in "\n\t" for character in lone)
    return None if ends_mixed or hidden else text


def edited_bytes(before: bytes, given: str) -> bytes:
    """The bytes of an edited text: a browser sends each line end as CR LF, and the payload keeps those that it had."""
    text = given.replace("\r\n", "\n")
    return (text.replace("\n", "\r\n") if b"\r\n" in before else text).encode("utf-8", "surrogatepass")
