"""`LetterFilter`: which dead letters a decision is about."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import datetime
from typing import Any, Final

from stormproof.core.errors import UsageError
from stormproof.core.source.dead_letter import DeadLetter, LetterHead
from stormproof.core.source.files.rows import shown_payload
from stormproof.trident.wording import moment


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Each field that is not None must hold: texts must be equal, and `match` be found in the error or the payload.

    `sink`, `first` and `last` admit only what a sink rejected: there, and from one txid to another. `error_class` admits an
    SQLSTATE also by its first two characters; the component of what a sink rejected is the sink.
    """

    source: str | None = None
    reason: str | None = None
    component: str | None = None
    error_class: str | None = None
    match: str | None = None
    since: datetime | None = None
    until: datetime | None = None
    sink: str | None = None
    first: int | None = None
    last: int | None = None

    @property
    def is_empty(self) -> bool:
        """Whether every dead letter passes."""
        return all(getattr(self, field.name) is None for field in fields(self))

    @property
    def is_of_sinks(self) -> bool:
        """Whether only what a sink rejected passes."""
        return (self.sink, self.first, self.last) != (None, None, None)

    @property
    def without_sink(self) -> LetterFilter:
        """The same at any sink."""
        return replace(self, sink=None)

    def admits(self, head: LetterHead) -> bool:
        """Whether a dead letter of a source passes by all but `source` and `match`."""
        return (
            not self.is_of_sinks
            and (self.reason is None or self.reason == head.reason)
            and (self.component is None or self.component == head.component)
            and (self.error_class is None or self.error_class == head.error_class)
            and (self.since is None or head.dead_at >= self.since)
            and (self.until is None or head.dead_at < self.until)
        )

    def admits_source(self, names: Sequence[str]) -> bool:
        """Whether those of a source may pass; `names` are its name and, of several spouts, its spout's."""
        return self.source is None or self.source in names

    def matches(self, letter: DeadLetter) -> bool:
        """Whether `match` is in the error or the payload."""
        return self.match is None or self.match in letter.error or self.match in shown_payload(letter.payload)


def filter_of(where: Sequence[str], **given: object) -> LetterFilter:
    """The filter that a person's values name: each on its own, and `--where KEY=VALUE` for any of them.

    Raises:
        UsageError: a key is unknown or given twice, or a time or a txid cannot be read.
    """
    found = {name: str(value) for name, value in given.items() if value is not None}
    for one in where:
        key, equals, value = one.partition("=")
        name = key.strip().replace("-", "_")
        if not equals or name not in given:
            keys = ", ".join(one.replace("_", "-") for one in given)
            raise UsageError(f"--where {one}: write KEY=VALUE with one of the keys {keys}", where=one)
        if name in found:
            raise UsageError(f"--where {one}: {key.strip()} is given twice", where=one)
        found[name] = value.strip()
    values: dict[str, Any] = {name: _READ[name](name, text) if name in _READ else text for name, text in found.items()}
    return LetterFilter(**values)


def _txid(name: str, text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise UsageError(f"{name}: {text[:40]!r} is no txid")
    return int(text)


_READ: Final[Mapping[str, Callable[[str, str], object]]] = {
    "since": moment,
    "until": moment,
    "first": _txid,
    "last": _txid,
}
