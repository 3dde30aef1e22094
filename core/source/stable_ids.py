"""`id_from`: where the id of a message stands that its publisher gave it, and what becomes of a message without one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stormproof.core.base.arguments import require_text
from stormproof.core.base.errors import UsageError
from stormproof.core.base.message import storable_text
from stormproof.core.contract.payload import sealed, unsealed
from stormproof.core.contract.source import Decoder
from stormproof.core.pending.journal import STABLE_ID_MAX, Delivery
from stormproof.core.source.metadata import MarkedDecoder

MESSAGE_ID: Final = "message_id"
HEADER: Final = "header:"
FIELD: Final = "field:"
_MARK: Final = b"\0stormproof: no id\0"
"""Begins the payload of a message without an id; behind it and another NUL stands the payload as it came."""
_REUSED: Final = b"\0stormproof: reused id\0"
"""Begins the payload of a message whose id came before with another payload; behind it stand the id, a NUL, and the payload
as it came.
"""


@dataclass(frozen=True, slots=True)
class IdFrom:
    """Where ids stand: ``message_id`` (a property of the broker's), ``header:NAME``, or ``field:NAME`` of a JSON payload."""

    text: str

    @classmethod
    def of(cls, where: str, given: object, *, properties: bool) -> IdFrom:
        """From the argument `id_from`; `properties`: the broker's messages have properties and headers.

        Raises:
            UsageError: it names no such place.
        """
        forms = ("message_id", "header:NAME", "field:NAME") if properties else ("field:NAME",)
        require_text(where, "id_from", given, forms[0])
        assert isinstance(given, str)
        kind, colon, name = given.partition(":")
        known = (colon and name and (kind == "field" or (properties and kind == "header"))) or (
            properties and given == MESSAGE_ID
        )
        if not known:
            raise UsageError(
                f"{where}: id_from is {given!r}; it is {' or '.join(forms)}, or None where messages have no id",
                argument="id_from",
            )
        return cls(given)

    def found(self, payload: bytes, message_id: object = None, headers: Mapping[str, Any] | None = None) -> str | None:
        """The id of a message; None: it has none that could be one."""
        value: object
        if self.text == MESSAGE_ID:
            value = message_id
        elif self.text.startswith(HEADER):
            value = (headers or {}).get(self.text.removeprefix(HEADER))
        else:
            value = _field(payload, self.text.removeprefix(FIELD))
        if isinstance(value, bytes):
            value = value.decode("utf-8", "replace")
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            return None
        text = str(value)
        return text if 0 < len(text) < STABLE_ID_MAX and text.isprintable() else None

    def identified(
        self, payload: bytes, message_id: object = None, headers: Mapping[str, Any] | None = None
    ) -> tuple[str, bytes]:
        """The stable id of a message, and the payload to keep.

        A message without an id is kept under a digest, and fails when it is decoded. So it becomes a dead letter, and the
        same one where it comes again; of several that are alike, one is kept.
        """
        found = self.found(payload, message_id, headers)
        if found is not None:
            return f"={found}", payload
        digest = hashlib.sha256(payload).hexdigest()
        return f"none {digest}", _MARK + payload

    @staticmethod
    def reused(message: Delivery) -> Delivery:
        """What is written down in place of a message whose id came before with another payload: it fails when it is decoded.

        It is kept under a digest, so it is the same one where it comes again.
        """
        id_ = message.stable_id.encode()
        digest = hashlib.sha256(id_ + b"\0" + message.payload).hexdigest()
        payload = _REUSED + id_.removeprefix(b"=") + b"\0" + message.payload
        stored = None if message.stored is None else sealed(payload, unsealed(message.stored)[1])
        return Delivery(f"reused {digest}", message.handle, payload, stored)

    @staticmethod
    def decoder(inner: Decoder, id_from: str | None) -> Decoder:
        """Fails what had no id, or one that another message had; the rest is `inner`'s. Also where no id is asked for: such
        a message may have come when one was.
        """
        wanted = id_from or "id_from"
        return ReusedDecoder(IdentifiedDecoder(inner, wanted), wanted)


def _field(payload: bytes, name: str) -> object:
    try:
        parsed = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return parsed.get(name) if isinstance(parsed, dict) else None


class IdentifiedDecoder(MarkedDecoder):
    """Fails messages that came without an id; the rest is `inner`'s."""

    __slots__ = ()
    MARK = _MARK

    def error(self, rest: bytes) -> str:
        """Says where the id is looked for, and how the message begins."""
        start = storable_text(rest[:60].decode("utf-8", "replace"))
        return (
            f"the message has no id in {self.wanted} (text of 1 to {STABLE_ID_MAX - 1} printable characters, or a whole "
            f"number), so its deliveries could not be told apart; it begins with {start!r}. Have its publisher set one"
        )


class ReusedDecoder(MarkedDecoder):
    """Fails messages whose id came before with another payload; the rest is `inner`'s."""

    __slots__ = ()
    MARK = _REUSED

    def error(self, rest: bytes) -> str:
        """Names the id, and says how the message begins."""
        id_, _, payload = rest.partition(b"\0")
        start = storable_text(payload[:60].decode("utf-8", "replace"))
        return (
            f"the id {id_.decode('utf-8', 'replace')!r} in {self.wanted} came before with another payload, so this message "
            f"cannot be told from that one; it begins with {start!r}. Have its publisher give each message an id of its "
            "own. To apply it all the same, edit the dead letter"
        )
