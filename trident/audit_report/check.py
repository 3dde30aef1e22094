"""Checks a report file without the ledger: is it as it was made, who signed it, and what differs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest
from typing import Any, Final

from stormproof.core.errors import Json
from stormproof.trident.audit_report.keys import PublicKey
from stormproof.trident.audit_report.page import RENDERER, page
from stormproof.trident.audit_report.seal import Damaged, Parts, canonical, sha256, taken_apart

LINES_SHOWN: Final = 5


class Finding(StrEnum):
    """What a check found; append-only."""

    GENUINE = "genuine"
    """As it was signed, by the key that was given."""
    ALTERED = "altered"
    """It is not as it was made, or not signed by that key."""
    CANNOT_TELL = "cannot_tell"
    """It agrees with itself, and nothing shows who made it: it is not signed, or no public key was given."""


@dataclass(frozen=True, slots=True)
class Checked:
    """The result of a check. `differs` names each thing that is wrong; `open` what the check could not settle."""

    sha256: str
    finding: Finding
    differs: tuple[str, ...]
    open: tuple[str, ...]
    signed_by: str | None = None
    scope: Mapping[str, Json] | None = None
    made_at: Json = None
    verdict: Json = None
    """The verdict that the report has: of the ledger, not of this check."""

    @property
    def exit_status(self) -> int:
        """0: genuine; 1: altered; 4: cannot tell."""
        return {Finding.GENUINE: 0, Finding.ALTERED: 1, Finding.CANNOT_TELL: 4}[self.finding]


def check(data: bytes, key: PublicKey | None, digest: str | None = None) -> Checked:
    """Check a report file against a public key, or the SHA-256 that its maker was shown."""
    found = sha256(data)
    differs: list[str] = []
    left_open: list[str] = []
    if digest is not None and digest.lower() != found:
        differs.append(f"the file's SHA-256 is {found}, not {digest.lower()}")
    try:
        parts = taken_apart(data)
    except Damaged as error:
        return Checked(found, Finding.ALTERED, (*differs, str(error)), ())
    differs += _content(parts, left_open)
    differs += _signature(parts, key, left_open, vouched=digest is not None)
    finding = Finding.ALTERED if differs else Finding.CANNOT_TELL if left_open else Finding.GENUINE
    scope = parts.record.get("scope")
    verdict = parts.record.get("verdict")
    return Checked(
        found,
        finding,
        tuple(differs),
        tuple(left_open),
        None if parts.seal.key is None else parts.seal.key.fingerprint,
        scope if isinstance(scope, dict) else None,
        parts.record.get("made_at"),
        verdict.get("verdict") if isinstance(verdict, dict) else None,
    )


def _content(parts: Parts, left_open: list[str]) -> list[str]:
    """What differs of record and page, from the seal and from each other."""
    differs: list[str] = []
    try:
        of_record = sha256(canonical(parts.record))
    except ValueError as error:
        return [f"the record has a value that no report has: {error}"]
    of_page = sha256(parts.page.encode())
    if of_record != parts.seal.record_sha256:
        differs.append(f"the record was changed: its SHA-256 is {of_record}, the seal says {parts.seal.record_sha256}")
    if of_page != parts.seal.page_sha256:
        differs.append(f"the page was changed: its SHA-256 is {of_page}, the seal says {parts.seal.page_sha256}")
    if parts.record.get("renderer") != RENDERER:
        if parts.seal.signature is None:
            left_open.append(
                f"the page is of form {parts.record.get('renderer')!r}, this version makes form {RENDERER}: whether it "
                "shows its record cannot be compared"
            )
        return differs
    try:
        made = page(parts.record)
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        return [*differs, f"the record is not one that a page can be made of: {type(error).__name__}: {error}"]
    if made != parts.page:
        differs += [f"the page does not show its record: {line}" for line in _lines(parts.page, made)]
    return differs


def _lines(found: str, made: str) -> list[str]:
    """The first lines that differ."""
    pairs = enumerate(zip_longest(found.split("\n"), made.split("\n")), 1)
    wrong = [(number, one, other) for number, (one, other) in pairs if one != other]
    told = [
        f"line {number} is {_short(one)}, the record gives {_short(other)}"
        for number, one, other in wrong[:LINES_SHOWN]
    ]
    return told + ([f"and {len(wrong) - LINES_SHOWN} more lines"] if len(wrong) > LINES_SHOWN else [])


def _short(line: Any) -> str:
    return "missing" if line is None else ascii(line if len(line) <= 120 else f"{line[:120]}...")


def _signature(parts: Parts, key: PublicKey | None, left_open: list[str], *, vouched: bool) -> list[str]:
    seal = parts.seal
    said = parts.record.get("signed_by")
    if seal.key is None or seal.signature is None:
        differs = [] if said is None else ["the page says that it is signed, and there is no signature"]
        if key is not None:
            differs.append("it is not signed")
        elif not vouched:
            left_open.append("it is not signed: compare its SHA-256 with the one that its maker was shown (--sha256)")
        return differs
    differs = []
    if said != seal.key.fingerprint:
        differs.append(f"the page names the key {said!r}, the seal {seal.key.fingerprint}")
    if not seal.key.has_signed(seal.signed_bytes(), seal.signature):
        differs.append(f"the signature is not one of the key {seal.key.fingerprint} over this report")
    if key is None and not vouched:
        left_open.append(f"whose key {seal.key.fingerprint} is: give the signer's with --public-key")
    elif key is not None and key != seal.key:
        differs.append(f"it is signed with the key {seal.key.fingerprint}, not with {key.fingerprint}, which was given")
    return differs
