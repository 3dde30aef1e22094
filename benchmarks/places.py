"""Where both sides of a measurement keep their tables: a folder of this machine, or an object store."""

from __future__ import annotations

import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from benchmarks.maven_jars import ROOT
from benchmarks.workbench import Workbench

if TYPE_CHECKING:
    from support.brokers.object_store import SeaweedFS


COMMITTER: Final = {
    "spark.sql.sources.commitProtocolClass": "org.apache.spark.internal.io.cloud.PathOutputCommitProtocol",
    "spark.sql.parquet.output.committer.class": "org.apache.spark.internal.io.cloud.BindingParquetOutputCommitter",
}
"""How Spark writes Parquet files to S3 without renames, each of which is a copy there."""


@dataclass(frozen=True, slots=True)
class Place:
    """`suffix` is what a figure's key has in addition there; `options` are how delta-rs reaches it."""

    root: str
    suffix: str = ""
    options: Mapping[str, str] = field(default_factory=dict[str, str])

    def table(self, bench: Workbench, what: str) -> str:
        """The address of a table that nothing has yet."""
        return f"{self.root}/{bench.unused(what)}"


def for_spark(address: str) -> str:
    """The same address as Spark's writers name it."""
    return f"s3a{address.removeprefix('s3')}" if address.startswith("s3://") else address


def on_disk(bench: Workbench) -> Place:
    """The measurement's own folder."""
    return Place(str(bench.folder))


@contextmanager
def in_a_store(bench: Workbench) -> Generator[Place]:
    """SeaweedFS on this machine, which the tests use, too."""
    folder = bench.path("store")
    folder.mkdir()
    server = seaweed()(folder)
    server.prepare()
    try:
        server.start()
        yield Place(f"{server.url}/bench", "-store", server.options())
    finally:
        server.kill()


def tell_spark(bench: Workbench, place: Place) -> None:
    """Tell the rival's session how to reach the store."""
    options = place.options
    settings = {
        "endpoint": options["AWS_ENDPOINT_URL"],
        "endpoint.region": options["AWS_REGION"],
        "access.key": options["AWS_ACCESS_KEY_ID"],
        "secret.key": options["AWS_SECRET_ACCESS_KEY"],
        "path.style.access": "true",
        "committer.name": "magic",
        "connection.ssl.enabled": "false",
    }
    for name, value in settings.items():
        bench.rival_session.conf.set(f"fs.s3a.{name}", value)
    for name, value in COMMITTER.items():
        bench.rival_session.conf.set(name, value)


def seaweed() -> type[SeaweedFS]:
    """The tests' server."""
    if (tests := str(ROOT / "tests")) not in sys.path:
        sys.path.append(tests)
    from support.brokers.object_store import SeaweedFS

    return SeaweedFS
