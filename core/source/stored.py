"""A broker's message as it is stored: its payload as the server sent it, and all that the server says of it beside that.

Nothing of it depends on what a source was made with: fields, decoder and metadata are chosen when it is read.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, Final, cast

from stormproof.core.errors import UsageError

_BEGIN: Final = b"\xff\xff\xff\xfe"
"""No text begins so, and no Arrow stream."""
_BEGIN_EMPTY: Final = b"\xff\xff\xff\xfd"
"""Of a message without a payload (a tombstone)."""
_FACTS_AT: Final = 8
"""Behind the beginning, and the length of the facts in four bytes."""


def _text(value: object) -> str:
    assert isinstance(value, bytes)
    return value.decode("utf-8", "surrogateescape")


_encode: Final = json.JSONEncoder(default=_text, separators=(",", ":"), check_circular=False).encode


def sealed(payload: bytes | None, facts: Mapping[str, object]) -> bytes:
    """What is stored. Facts are JSON values, or bytes, which come back as text (`bytes_of`)."""
    text = _encode(facts).encode()
    begin = _BEGIN_EMPTY if payload is None else _BEGIN
    return b"%b%b%b%b" % (begin, len(text).to_bytes(_FACTS_AT - len(begin), "big"), text, payload or b"")


def sealed_payload(stored: bytes) -> bytes | None:
    """The payload alone, of a message that was stored so."""
    return None if stored.startswith(_BEGIN_EMPTY) else stored[_facts_end(stored) :]


def _facts_end(stored: bytes) -> int:
    return _FACTS_AT + int.from_bytes(stored[len(_BEGIN) : _FACTS_AT], "big")


def unsealed(stored: bytes) -> tuple[bytes | None, dict[str, Any]]:
    """Payload and facts again.

    Raises:
        UsageError: it was not stored so.
    """
    facts: object = None
    if stored.startswith((_BEGIN, _BEGIN_EMPTY)):
        with suppress(ValueError):
            facts = json.loads(stored[_FACTS_AT : _facts_end(stored)])
    if not isinstance(facts, dict):
        raise UsageError(f"a stored message of {len(stored)} bytes has not what its server said of it")
    return sealed_payload(stored), cast("dict[str, Any]", facts)


def payload_in(stored: bytes) -> bytes:
    """The payload of a message that was stored so; of any other the whole."""
    try:
        return unsealed(stored)[0] or b""
    except UsageError:
        return stored


def bytes_of(text: str) -> bytes:
    """Bytes that were a fact."""
    return text.encode("utf-8", "surrogateescape")
