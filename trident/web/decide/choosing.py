"""Which dead letters are meant: those selected, those that a filter admits, or expressly all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from stormproof.core.errors import UsageError
from stormproof.trident.web.decide.action import Choice, Field
from stormproof.trident.wording import counted

SHOWN_IDS = 20

ALL = Field("all", "All of them", "checkbox", "with no filter")
CANARY = (
    Field("canary", "Canary: first", "number", "messages"),
    Field("max_failures", "Share that may fail", "text", "0.05; default 0"),
    Field("wait", "Seconds for each wave", "number", "default 300"),
)


def command_of(words: str, topology: str, ids: Sequence[str], filters: Mapping[str, str | None], *, every: bool) -> str:
    """A command that chooses the same."""
    options = [f"--{name.replace('_', '-')} {quoted(value)}" for name, value in filters.items() if value is not None]
    shown = [quoted(one) for one in ids[:SHOWN_IDS]] + (["..."] if len(ids) > SHOWN_IDS else [])
    return " ".join([f"stormproof {words}", quoted(topology), *shown, *(["--all"] if every else []), *options])


def quoted(text: str) -> str:
    """A text as a shell's word."""
    import shlex

    return shlex.quote(text)


def require_chosen(ids: Sequence[str], *, is_empty: bool, every: bool) -> str | None:
    """Why nothing is chosen; None: something is. An empty filter must be confirmed by choosing all.

    Raises:
        UsageError: more than one of selected, filter, and all.
    """
    chosen = (bool(ids), not is_empty, every)
    if sum(chosen) > 1:
        raise UsageError("choose messages, or a filter, or all of them: only one of these")
    return None if any(chosen) else "Nothing is chosen yet: fill in a filter, or check “All of them”."


def of_choice(choice: Choice, names: Sequence[str]) -> dict[str, str | None]:
    """The filter's texts in a choice."""
    return {name: choice.text(name) for name in names}


def changes(before: Set[str | int], now: Set[str | int], noun: str) -> list[str]:
    """What changed since somebody looked."""
    found = list[str]()
    if gone := len(before - now):
        found.append(
            f"since you looked, {counted(gone, noun)} of these {_was(gone)} decided about by others: left alone"
        )
    if new := len(now - before):
        found.append(f"since you looked, {counted(new, noun)} more came to match: not touched")
    return found


def _was(number: int) -> str:
    return "was" if number == 1 else "were"


def canary_numbers(given: Mapping[str, str | None]) -> tuple[int, float, float] | None:
    """First wave, share and seconds of a canary; None: none is wanted.

    Raises:
        UsageError: one of them is no number, or is given without a first wave.
    """
    from stormproof.trident.decisions.canary import WAIT_S

    first, share, wait = (given.get(name) for name in ("canary", "max_failures", "wait"))
    if first is None:
        if share is not None or wait is not None:
            raise UsageError("a share of failures and a time belong to a canary: say how many messages it begins with")
        return None
    try:
        return int(first), 0.0 if share is None else float(share), WAIT_S if wait is None else float(wait)
    except ValueError:
        raise UsageError("a canary needs numbers: messages to begin with, a share as 0.05, seconds") from None
