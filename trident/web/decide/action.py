"""`Action`: a decision as the page offers it: what must be known before, what it is about now, and what it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from starlette.datastructures import QueryParams

from stormproof.core.message import storable_text

if TYPE_CHECKING:
    from stormproof.trident.decisions.canary import CanaryReport
    from stormproof.trident.stores import Stores

VALUE_MAX = 4_000
"""Characters of a field's value; an edited payload may have more."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a form. `kind` is HTML's, or `payload`, which is a large text that keeps its line ends."""

    name: str
    label: str
    kind: Literal["text", "number", "checkbox", "hidden", "payload"] = "text"
    hint: str = ""
    required: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """What a decision is about, as the address or a form says it."""

    topology: str
    params: QueryParams

    def text(self, name: str) -> str | None:
        """A parameter; None if it is missing or blank."""
        return self.params.get(name, "").strip() or None

    def texts(self, name: str) -> tuple[str, ...]:
        """All values of a parameter, each once, in their order."""
        return tuple(dict.fromkeys(one.strip() for one in self.params.getlist(name) if one.strip()))

    def is_on(self, name: str) -> bool:
        """Whether a checkbox is checked."""
        return self.text(name) is not None


@dataclass(frozen=True, slots=True)
class Look:
    """What a decision would be about if it were taken now.

    `facts` are compared with those at the time of the confirmation: if one differs, nothing is done. `pinned` is what the
    decision acts on, and nothing else: a message that comes later is not touched. `said` are further lines for people.
    `nothing` says why there is nothing to decide.
    """

    facts: Mapping[str, str]
    count: int | None = None
    noun: str = "message"
    pinned: Any = None
    said: tuple[str, ...] = ()
    classes: tuple[tuple[str, ...], ...] = ()
    """A table of what is counted; the first row has the heads."""
    nothing: str | None = None
    command: str = ""
    """The same on the command line."""
    prefilled: Mapping[str, str] = field(default_factory=dict[str, str])
    """Values of the confirmation's own fields."""


@dataclass(frozen=True, slots=True)
class Given:
    """What was filled in with the confirmation: who, why, and the action's own fields."""

    by: str
    why: str
    params: QueryParams

    @staticmethod
    def of(by: str, form: QueryParams) -> Given:
        """From a form; texts are made storable, as those of the command line are."""
        return Given(
            storable_text(by.strip()[:VALUE_MAX]), storable_text(form.get("why", "").strip()[:VALUE_MAX]), form
        )

    def text(self, name: str) -> str | None:
        """A field; None if it is missing or blank."""
        return self.params.get(name, "").strip() or None


@dataclass(frozen=True, slots=True)
class Done:
    """What a decision did, in sentences. `ok` is off where something of it was refused."""

    lines: tuple[str, ...]
    ok: bool = True
    canary: CanaryRun | None = None
    """A canary that has begun, and goes on."""


Told: TypeAlias = Callable[["CanaryReport"], None]
Stopped: TypeAlias = Callable[[], bool]


@dataclass(frozen=True, slots=True)
class CanaryRun:
    """A canary to be run in a thread of its own: it gets a listener, and what says that it is to stop."""

    run: Callable[[Told, Stopped], CanaryReport]


Looks: TypeAlias = Callable[["Stores", Choice], Look]
Does: TypeAlias = Callable[["Stores", Choice, Look, Given], Done]


@dataclass(frozen=True, slots=True)
class Action:
    """One decision.

    `choice` are the fields that say what it is about: they are in the address. `given` are filled in with the confirmation.
    `warning` is shown where the decision cannot be taken back.
    """

    name: str
    title: str
    button: str
    look: Looks
    do: Does
    choice: Sequence[Field] = ()
    given: Sequence[Field] = ()
    warning: str = ""
    about: str = ""
    """One sentence: what it does."""
