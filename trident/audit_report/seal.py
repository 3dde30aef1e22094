"""A report file: the page, which has the record in it, and behind it the seal, with the digests of both and a signature.

The signature is over the digests, and the digests are over the record's canonical bytes (RFC 8785) and over every byte of
the page before the seal. So neither can be changed without the other check noticing.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import html
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from stormproof.core.errors import Json
from stormproof.core.extras import required
from stormproof.trident.audit_report.keys import EXTRA, WHO, PublicKey, SigningKey
from stormproof.trident.audit_report.page import RECORD_END, RECORD_START, page

FORMAT: Final = 1
SIGNED_PREFIX: Final = b"stormproof audit report 1\n"
"""Before the signed statement, so that no signature of this key for another purpose passes for one of a report."""
ALGORITHM: Final = "Ed25519"
SEAL_START: Final = '<pre id="stormproof-seal">\n'
SEAL_END: Final = "\n</pre>\n</main>\n</body>\n</html>\n"


class Damaged(Exception):
    """The file does not have the parts that a report has."""


@dataclass(frozen=True, slots=True)
class Seal:
    """What stands behind the page. `key` and `signature` are None in a report that nobody signed."""

    record_sha256: str
    page_sha256: str
    key: PublicKey | None = None
    signature: bytes | None = None

    def signed_bytes(self) -> bytes:
        """What the signature is over."""
        return SIGNED_PREFIX + canonical(self._statement())

    def _statement(self) -> dict[str, Json]:
        key = None if self.key is None else base64.b64encode(self.key.raw).decode()
        return {
            "format": FORMAT,
            "record_sha256": self.record_sha256,
            "page_sha256": self.page_sha256,
            "algorithm": None if self.key is None else ALGORITHM,
            "public_key": key,
        }

    def text(self) -> str:
        """As it stands in the file."""
        signature = None if self.signature is None else base64.b64encode(self.signature).decode()
        return json.dumps({**self._statement(), "signature": signature}, indent=1)

    @staticmethod
    def of(text: str) -> Seal:
        """Read it again.

        Raises:
            Damaged: it is none, or not written as `text` writes it.
        """
        try:
            found = json.loads(text)
            key, signature = found["public_key"], found["signature"]
            seal = Seal(
                str(found["record_sha256"]),
                str(found["page_sha256"]),
                None if key is None else PublicKey(base64.b64decode(key, validate=True)),
                None if signature is None else base64.b64decode(signature, validate=True),
            )
        except (ValueError, TypeError, KeyError, RecursionError, binascii.Error) as error:
            raise Damaged(f"the seal at the end of the file cannot be read: {error}") from error
        if seal.text() != text:
            raise Damaged("the seal at the end of the file is not written as a seal is")
        return seal


@dataclass(frozen=True, slots=True)
class Parts:
    """A report file, taken apart."""

    page: str
    record: dict[str, Json]
    seal: Seal


def canonical(value: Json | Mapping[str, Json]) -> bytes:
    """The one form of these values as JSON, by RFC 8785."""
    rfc8785 = required("rfc8785", EXTRA, WHO)
    found: bytes = rfc8785.dumps(value)
    return found


def sha256(data: bytes) -> str:
    """In hex."""
    return hashlib.sha256(data).hexdigest()


def sealed(record: dict[str, Json], key: SigningKey | None) -> bytes:
    """The report file of a record, signed if there is a key."""
    signed_by = None if key is None else key.public.fingerprint
    whole: dict[str, Json] = {**record, "signed_by": signed_by}
    made = page(whole)
    unsigned = Seal(sha256(canonical(whole)), sha256(made.encode()), None if key is None else key.public)
    seal = unsigned
    if key is not None:
        seal = Seal(unsigned.record_sha256, unsigned.page_sha256, key.public, key.sign(unsigned.signed_bytes()))
    return f"{made}{SEAL_START}{seal.text()}{SEAL_END}".encode()


def taken_apart(data: bytes) -> Parts:
    """The parts of a report file.

    Raises:
        Damaged: it is none, or parts of it are missing or cannot be read.
    """
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        raise Damaged(f"the file is not text in UTF-8: byte {error.start}") from error
    before, start, rest = text.rpartition(SEAL_START)
    if not start or not rest.endswith(SEAL_END):
        raise Damaged("the file does not end with a seal: it is no audit report, or its end was changed or cut off")
    seal = Seal.of(rest.removesuffix(SEAL_END))
    if before.count(RECORD_START) != 1:
        raise Damaged("the page does not have its record: its beginning was changed")
    written, end, _ = before.partition(RECORD_START)[2].partition(RECORD_END)
    if not end:
        raise Damaged("the page does not have its record: its end was changed")
    return Parts(before, _record_of(written), seal)


def _record_of(written: str) -> dict[str, Json]:
    try:
        found = json.loads(html.unescape(written), object_pairs_hook=_once, parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise Damaged(f"the record in the page cannot be read: {error}") from error
    if not isinstance(found, dict):
        raise Damaged("the record in the page is no JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _no_number(text: str) -> object:
    raise ValueError(f"{text} is no number of JSON")
