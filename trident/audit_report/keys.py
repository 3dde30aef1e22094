"""Ed25519 keys, as PEM or as OpenSSH writes them."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stormproof.core.errors import UsageError
from stormproof.core.extras import required

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

EXTRA: Final = "report"
WHO: Final = "the audit's report file"
_SSH_TYPE: Final = b"ssh-ed25519"


@dataclass(frozen=True, slots=True)
class PublicKey:
    """A public key: its 32 bytes."""

    raw: bytes

    @property
    def fingerprint(self) -> str:
        """As `ssh-keygen -l` shows it."""
        blob = b"".join(len(part).to_bytes(4, "big") + part for part in (_SSH_TYPE, self.raw))
        return f"SHA256:{base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip('=')}"

    def has_signed(self, message: bytes, signature: bytes) -> bool:
        """Whether the signature of the message is this key's."""
        ed25519 = required("cryptography.hazmat.primitives.asymmetric.ed25519", EXTRA, WHO)
        exceptions = required("cryptography.exceptions", EXTRA, WHO)
        try:
            ed25519.Ed25519PublicKey.from_public_bytes(self.raw).verify(signature, message)
        except (exceptions.InvalidSignature, ValueError):
            return False
        return True

    @staticmethod
    def read(path: Path) -> PublicKey:
        """The public key in a file: PEM, a line as in ``id_ed25519.pub``.

        Raises:
            UsageError: the file cannot be read, or has no Ed25519 public key.
        """
        data = _read(path)
        serialization = required("cryptography.hazmat.primitives.serialization", EXTRA, WHO)
        exceptions = required("cryptography.exceptions", EXTRA, WHO)
        load = (
            serialization.load_pem_public_key
            if data.lstrip().startswith(b"-----BEGIN")
            else serialization.load_ssh_public_key
        )
        try:
            key = load(data)
        except (ValueError, exceptions.UnsupportedAlgorithm) as error:
            raise UsageError(f"{path} is no public key in PEM or OpenSSH's form: {error}", file=str(path)) from error
        return PublicKey(_raw(key, "Ed25519PublicKey", path))


@dataclass(frozen=True, slots=True)
class SigningKey:
    """A private key, in memory."""

    key: Ed25519PrivateKey

    @property
    def public(self) -> PublicKey:
        """Its public key."""
        return PublicKey(self.key.public_key().public_bytes_raw())

    def sign(self, message: bytes) -> bytes:
        """The signature of a message: 64 bytes, the same each time."""
        return self.key.sign(message)

    def __repr__(self) -> str:
        return f"SigningKey({self.public.fingerprint})"

    @staticmethod
    def read(path: Path, passphrase: Callable[[], bytes]) -> SigningKey:
        """The private key in a file: PEM (PKCS#8), or as ``ssh-keygen -t ed25519`` writes it.

        `passphrase` is asked only where the key is encrypted.

        Raises:
            UsageError: the file cannot be read, has no Ed25519 private key, or the passphrase is wrong.
        """
        data = _read(path)
        serialization = required("cryptography.hazmat.primitives.serialization", EXTRA, WHO)
        exceptions = required("cryptography.exceptions", EXTRA, WHO)
        is_ssh = b"BEGIN OPENSSH PRIVATE KEY" in data
        load = serialization.load_ssh_private_key if is_ssh else serialization.load_pem_private_key
        try:
            try:
                key = load(data, None)
            except TypeError:  # it is encrypted
                key = load(data, passphrase())
        except (ValueError, TypeError, exceptions.UnsupportedAlgorithm) as error:
            raise UsageError(
                f"{path} cannot be used to sign: it is no private key in PEM or OpenSSH's form, or its passphrase is "
                f"another one ({error})",
                file=str(path),
            ) from error
        ed25519 = required("cryptography.hazmat.primitives.asymmetric.ed25519", EXTRA, WHO)
        if not isinstance(key, ed25519.Ed25519PrivateKey):
            raise _wrong_kind(path, key)
        return SigningKey(key)


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"the key file {path} cannot be read: {error.strerror}", file=str(path)) from error


def _raw(key: Any, kind: str, path: Path) -> bytes:
    ed25519 = required("cryptography.hazmat.primitives.asymmetric.ed25519", EXTRA, WHO)
    if not isinstance(key, getattr(ed25519, kind)):
        raise _wrong_kind(path, key)
    found: bytes = key.public_bytes_raw()
    return found


def _wrong_kind(path: Path, key: object) -> UsageError:
    return UsageError(
        f"{path} has a key of another kind ({type(key).__name__.removeprefix('_')}); a report is signed with Ed25519, as "
        "from: ssh-keygen -t ed25519",
        file=str(path),
    )
