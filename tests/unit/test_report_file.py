"""The report file of the audit: sealed, checked, and inert."""

from __future__ import annotations

import base64
import hashlib
import json
import random
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, Final

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from stormproof.core.errors import Json, UsageError
from stormproof.trident.audit_report import Finding, PublicKey, SigningKey, check, sealed
from stormproof.trident.audit_report.page import RENDERER, page
from stormproof.trident.audit_report.seal import SEAL_START, canonical, sha256

KEY: Final = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(range(32))))
OTHER: Final = SigningKey(Ed25519PrivateKey.from_private_bytes(bytes(32)))
HOSTILE: Final = (
    "<script>alert(1)</script>",
    "</pre><img src=x onerror=alert(1)>",
    '"><svg/onload=alert(1)>',
    "&lt;b&gt; &amp;copy &#60;i&#62;",
    "\u202egnp.exe\u2066",
    "\x1b[2J\x07\x9b",
    "javascript:alert(1)",
    "]]>--><!--",
    SEAL_START,
    '<pre id="stormproof-record">\n',
    "x" * 1_000_000,
)


def record(text: str = "orders") -> dict[str, Json]:
    """A small record with a text in every place where a stranger's may stand."""
    scope: dict[str, Json] = {
        "topology": text,
        "incarnation": text,
        "since": None,
        "until": None,
        "batches": 2,
        "first": 1,
        "last": 2,
        "messages": 7,
        "failed": 1,
        "returned": 0,
        "rejected": 0,
        "bytes": 70,
    }
    rows: list[Json] = [{"txid": 1, text[:100]: text, "sinks": {text[:100]: {"rows": 1.5, "why": [text]}}}]
    return {
        "renderer": RENDERER,
        "made_at": "2026-11-23T05:00:00.000+00:00",
        "made_by": text,
        "stormproof": "0.1.0",
        "scope": scope,
        "topology": {"name": text},
        "graphs": [],
        "sinks": rows,
        "driver_lives": rows,
        "driver_events": [],
        "verdict": {
            "verdict": "clean",
            "violations": [],
            "notices": [{"text": text}],
            "tables": [{"sink": text, "rows": 3}],
        },
        "questions": [{"number": 1, "question": text, "command": text, "view": text, "rows": rows, "left_out": 3}],
        "digest": {"sha256": "00", "lines": 2, "of": text},
        "not_looked_at": [text],
    }


def test_a_report_is_genuine_for_the_key_that_signed_it() -> None:
    found = check(sealed(record(), KEY), KEY.public)
    assert (found.finding, found.exit_status, found.differs, found.open) == (Finding.GENUINE, 0, (), ())
    assert (found.signed_by, found.verdict) == (KEY.public.fingerprint, "clean")


def test_the_same_record_gives_the_same_bytes() -> None:
    assert sealed(record(), KEY) == sealed(record(), KEY)


def test_each_changed_byte_is_found(seed: int) -> None:
    data = sealed(record(), KEY)
    rng, seal = random.Random(seed), data.index(SEAL_START.encode())
    places = [*rng.sample(range(seal), 150), *range(seal, len(data))]
    for place in places:
        changed = bytes([*data[:place], data[place] ^ (1 << rng.randrange(7)), *data[place + 1 :]])
        assert check(changed, KEY.public).finding is Finding.ALTERED, place


@pytest.mark.parametrize("cut", [0, 1, 100, -1, -100])
def test_a_report_that_is_cut_or_longer_is_found(cut: int) -> None:
    data = sealed(record(), KEY)
    assert check(data[:cut], KEY.public).finding is Finding.ALTERED
    assert check(data + b" ", KEY.public).finding is Finding.ALTERED


def test_a_page_that_says_other_than_its_record_is_named_by_its_line() -> None:
    data = sealed(record(), KEY).replace(b"<td>7</td>", b"<td>8</td>").replace(b"<bdi>7</bdi>", b"<bdi>8</bdi>")
    found = check(data, KEY.public)
    assert any("the page was changed" in text for text in found.differs)
    assert any("<bdi>8</bdi>" in text and "<bdi>7</bdi>" in text for text in found.differs)
    assert not any("the record was changed" in text for text in found.differs)


def test_who_changes_record_and_page_and_digests_alike_lacks_the_signature() -> None:
    honest, forged = sealed(record(), KEY), sealed({**record(), "made_by": "eve"}, KEY)
    signature = json.loads(honest.decode().split(SEAL_START)[1].split("\n</pre>")[0])["signature"]
    of_forged = json.loads(forged.decode().split(SEAL_START)[1].split("\n</pre>")[0])["signature"]
    found = check(forged.replace(of_forged.encode(), signature.encode()), KEY.public)
    assert [text for text in found.differs if "signature" in text]
    assert len(found.differs) == 1


def test_another_key_is_named() -> None:
    found = check(sealed(record(), OTHER), KEY.public)
    assert found.finding is Finding.ALTERED
    assert any(KEY.public.fingerprint in text and OTHER.public.fingerprint in text for text in found.differs)


def test_without_a_public_key_nothing_shows_who_signed() -> None:
    found = check(sealed(record(), KEY), None)
    assert (found.finding, found.exit_status, found.differs) == (Finding.CANNOT_TELL, 4, ())


def test_an_unsigned_report_says_so_first_and_is_not_green() -> None:
    data = sealed(record(), None)
    assert "not signed" in data.decode().split("\n")[1]
    assert data.decode().index("THIS REPORT IS NOT SIGNED") < data.decode().index("<h1>")
    assert check(data, None).finding is Finding.CANNOT_TELL
    assert check(data, KEY.public).differs == ("it is not signed",)


def test_an_unsigned_report_is_known_by_its_digest() -> None:
    data = sealed(record(), None)
    digest = hashlib.sha256(data).hexdigest()
    assert check(data, None, digest).finding is Finding.GENUINE
    assert check(sealed({**record(), "made_by": "eve"}, None), None, digest).finding is Finding.ALTERED


def test_a_signature_taken_off_is_found() -> None:
    signed = sealed(record(), KEY).decode()
    seal = json.loads(signed.split(SEAL_START)[1].split("\n</pre>")[0])
    bare = json.dumps({**seal, "algorithm": None, "public_key": None, "signature": None}, indent=1)
    stripped = signed.replace(json.dumps(seal, indent=1), bare)
    found = check(stripped.encode(), None)
    assert found.differs == ("the page says that it is signed, and there is no signature",)


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes.update(name for name, _ in attrs)

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def parsed(text: str) -> _Tags:
    tags = _Tags()
    tags.feed(text)
    return tags


@pytest.mark.parametrize("text", HOSTILE, ids=range(len(HOSTILE)))
def test_hostile_texts_are_inert_and_come_back_whole(text: str) -> None:
    data = sealed(record(text), KEY)
    harmless, found = parsed(sealed(record(), KEY).decode()), parsed(data.decode())
    assert (found.tags, found.attributes) == (harmless.tags, harmless.attributes)
    assert "script" not in found.tags
    shown = data.decode()
    assert not {"\u202e", "\u2066", "\x1b", "\x9b", "\x07"} & set(shown)
    assert check(data, KEY.public).finding is Finding.GENUINE
    (written,) = [part for part in found.text if part.startswith('\n{\n "renderer"')]
    assert json.loads(written)["made_by"] == text


def test_a_name_that_stands_twice_in_the_record_is_refused() -> None:
    data = sealed(record(), None).decode()
    double = data.replace('"stormproof": "0.1.0"', '"stormproof": "0.1.0",\n "stormproof": "0.2.0"')
    assert "stands twice" in check(double.encode(), None).differs[0]


def test_the_page_is_made_anew_only_by_the_version_that_made_it() -> None:
    """Change RENDERER with the page's form, and this digest: an older report must be checked by its signature alone."""
    made = page({**record(), "signed_by": None})
    assert (RENDERER, sha256(made.encode())[:16]) == (3, "9eec119ea1bedfb9")
    old: dict[str, Any] = {**record(), "renderer": 0}
    assert check(sealed(old, KEY), KEY.public).finding is Finding.GENUINE
    assert check(sealed(old, None), None, sha256(sealed(old, None))).finding is Finding.CANNOT_TELL


def test_the_statement_that_is_signed_can_be_checked_by_other_programs() -> None:
    data = sealed(record(), KEY).decode()
    seal = json.loads(data.split(SEAL_START)[1].split("\n</pre>")[0])
    signature = base64.b64decode(seal.pop("signature"))
    message = b"stormproof audit report 1\n" + canonical(seal)
    KEY.key.public_key().verify(signature, message)
    assert seal["page_sha256"] == sha256(data.split(SEAL_START)[0].encode())


def test_keys_of_both_forms_are_read_and_other_kinds_refused(tmp_path: Path) -> None:
    made = KEY.key
    ssh, pem, public = tmp_path / "ssh", tmp_path / "pem", tmp_path / "public.pem"
    private = serialization.PrivateFormat
    locked = serialization.BestAvailableEncryption(b"open")
    ssh.write_bytes(made.private_bytes(serialization.Encoding.PEM, private.OpenSSH, serialization.NoEncryption()))
    pem.write_bytes(made.private_bytes(serialization.Encoding.PEM, private.PKCS8, locked))
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    public.write_bytes(made.public_key().public_bytes(serialization.Encoding.PEM, form))
    assert SigningKey.read(ssh, pytest.fail).public == KEY.public
    assert SigningKey.read(pem, lambda: b"open").public == KEY.public
    assert PublicKey.read(public) == KEY.public
    with pytest.raises(UsageError, match="passphrase is another one"):
        SigningKey.read(pem, lambda: b"shut")
    curve = ec.generate_private_key(ec.SECP256R1())
    pem.write_bytes(curve.private_bytes(serialization.Encoding.PEM, private.PKCS8, serialization.NoEncryption()))
    with pytest.raises(UsageError, match="another kind"):
        SigningKey.read(pem, lambda: b"")
    with pytest.raises(UsageError, match="cannot be read"):
        PublicKey.read(tmp_path / "none")
    with pytest.raises(UsageError, match="no public key"):
        PublicKey.read(ssh)


def test_a_fingerprint_is_that_of_ssh_keygen(tmp_path: Path) -> None:
    public = KEY.key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (tmp_path / "key.pub").write_bytes(public)
    try:
        told = subprocess.run(["ssh-keygen", "-lf", str(tmp_path / "key.pub")], capture_output=True, check=True)
    except FileNotFoundError:
        pytest.skip("there is no ssh-keygen here")
    assert KEY.public.fingerprint in told.stdout.decode()
    assert PublicKey.read(tmp_path / "key.pub") == KEY.public
