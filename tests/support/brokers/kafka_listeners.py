"""Kafka brokers with a further listener: behind a proxy that cuts connections, or one that asks who is there."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from support.brokers import free_port, running
from support.brokers.cutter import Cutter, Loses
from support.brokers.kafka import READY_S, KafkaBroker


class Frayed(Cutter):
    """Cuts a connection at a share of what clients send: before the server hears of it, or before the client hears back."""

    def __init__(self, server_port: int) -> None:
        super().__init__(server_port, also_after_s=0.05)
        self.rng = random.Random(0)
        self.share = 0.0

    def _taken(self, data: bytes) -> Loses | None:
        with self._lock:
            if self.rng.random() >= self.share:
                return None
            self.cut += 1
            return self.rng.choice(("answer", "request"))


class FrayedKafka(KafkaBroker):
    """A broker whose clients may come through a `Frayed` proxy; those of `servers` come to it directly."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._behind = free_port()
        self.proxy = Frayed(self._behind)

    def listeners(self) -> dict[str, tuple[str, int, int]]:
        return {"FRAYED": ("PLAINTEXT", self._behind, self.proxy.port)}

    @property
    def frayed(self) -> str:
        """For `bootstrap.servers`, through the proxy."""
        return f"127.0.0.1:{self.proxy.port}"


class SecuredKafka(KafkaBroker):
    """A broker with a listener that asks for a password, and one that is encrypted."""

    USER: ClassVar[str] = "ann"
    PASSWORD: ClassVar[str] = "correct-horse-battery"  # noqa: S105 - a test's own
    _STORE: ClassVar[str] = "store-password"

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.sasl_port, self.ssl_port = free_port(), free_port()

    @classmethod
    def missing(cls) -> str | None:
        return super().missing() or (None if shutil.which("keytool") else "keytool (it comes with Java)")

    @property
    def certificate(self) -> Path:
        """What a client trusts."""
        return self.folder / "broker.pem"

    def listeners(self) -> dict[str, tuple[str, int, int]]:
        return {
            "PASSWORD": ("SASL_PLAINTEXT", self.sasl_port, self.sasl_port),
            "ENCRYPTED": ("SSL", self.ssl_port, self.ssl_port),
        }

    def settings(self) -> str:
        login = "org.apache.kafka.common.security.plain.PlainLoginModule required"
        return (
            "sasl.enabled.mechanisms=PLAIN\n"
            f'listener.name.password.plain.sasl.jaas.config={login} user_{self.USER}="{self.PASSWORD}";\n'
            f"ssl.keystore.type=PKCS12\nssl.keystore.location={self._keys}\nssl.keystore.password={self._STORE}\n"
        )

    def prepare(self) -> None:
        store = ["-keystore", str(self._keys), "-storetype", "PKCS12", "-storepass", self._STORE, "-alias", "broker"]
        made = ["-keyalg", "RSA", "-dname", "CN=127.0.0.1", "-ext", "san=ip:127.0.0.1", "-validity", "7"]
        for command in (
            ["-genkeypair", *store, *made],
            ["-exportcert", "-rfc", *store, "-file", str(self.certificate)],
        ):
            subprocess.run(["keytool", *command], check=True, capture_output=True, timeout=READY_S)
        super().prepare()

    @property
    def _keys(self) -> Path:
        return self.folder / "broker.p12"


@pytest.fixture(scope="module")
def frayed_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FrayedKafka]:
    """A broker of the module's own, which its tests may kill, and reach through a proxy."""
    with running(FrayedKafka, tmp_path_factory) as broker:
        yield broker
        broker.proxy.__exit__()


@pytest.fixture(scope="module")
def secured_kafka(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SecuredKafka]:
    """A broker that asks for a password at one port, and is encrypted at another."""
    with running(SecuredKafka, tmp_path_factory) as broker:
        yield broker
