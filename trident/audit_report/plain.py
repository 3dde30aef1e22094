"""What a report is to be of; and values of the ledger as it has them: only what JSON can say in one way."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime
from decimal import Decimal
from enum import Enum
from typing import Any, Final

from stormproof.core.errors import Json

TEXT_MAX: Final = 1_000
"""Characters of one text that a report has."""
_WHOLE_MAX: Final = 2**53 - 1


def plain(value: Any) -> Json:
    """A value as JSON: times in ISO 8601 and UTC, numbers beyond 2^53 as text, long texts cut with their length said."""
    match value:
        case None | bool():
            return value
        case Enum():
            return plain(value.value)
        case str():
            return value if len(value) <= TEXT_MAX else f"{value[:TEXT_MAX]} [cut: {len(value)} characters]"
        case int():
            return value if abs(value) <= _WHOLE_MAX else str(value)
        case Decimal():
            return plain(int(value)) if value == value.to_integral_value() else plain(float(value))
        case float():
            return round(value, 3)
        case datetime():
            return value.astimezone(UTC).isoformat(timespec="milliseconds")
        case date():
            return value.isoformat()
        case _ if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        case Mapping():
            return {str(key): plain(one) for key, one in value.items()}
        case Iterable() if not isinstance(value, bytes):
            return [plain(one) for one in value]
        case _:
            raise TypeError(f"{type(value).__name__} has no place in a report")


def file_bytes(told: Json) -> bytes:
    """A report as it stands in its file: JSON for people and programs, always the same bytes of the same report.

    All is ASCII: a stranger's text (a name, a reason) does nothing to the terminal or the editor that shows it.
    """
    return json.dumps(told, indent=1, sort_keys=True, ensure_ascii=True, allow_nan=False).encode() + b"\n"


def digest_of(answer: Json) -> str:
    """SHA-256 of an answer, in hex: of its JSON without spaces, keys in order, in ASCII."""
    text = json.dumps(answer, separators=(",", ":"), sort_keys=True, ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


ROWS: Final = 200
"""Rows of each list that a report has unless another number is asked for."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a report is to be of."""

    topology: str
    since: datetime | None = None
    until: datetime | None = None
    rows: int = ROWS
    messages: tuple[str, ...] = ()
    """Messages whose whole history it has."""
    verdict: int | None = None
    """The number of a verdict that was kept; None: the verification is run."""
    payload_digests: bool = False
    """Whether dead letters and rejects have the SHA-256 of their payloads. A short payload can be guessed from it."""
