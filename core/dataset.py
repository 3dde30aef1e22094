"""What others call a table, a topic or a folder: names by OpenLineage's naming rules, without a user or a password."""

from __future__ import annotations

import os
from dataclasses import dataclass
from urllib.parse import urlsplit


@dataclass(frozen=True, slots=True)
class DatasetName:
    """A dataset: the store that it is in, and its name there."""

    namespace: str
    name: str


def at_path(path: str) -> DatasetName:
    """A file, a folder or a pattern of them: on this machine, or in an object store."""
    parts = urlsplit(path)
    if parts.scheme and parts.netloc:
        scheme = "s3" if parts.scheme in ("s3a", "s3n") else parts.scheme
        return DatasetName(f"{scheme}://{parts.netloc.rpartition('@')[2]}", parts.path.strip("/") or "/")
    return DatasetName("file", os.path.abspath(parts.path if parts.scheme == "file" else path))


def at_server(scheme: str, address: str, name: str) -> DatasetName:
    """Something at a server; of the address, a URL or ``host:port``, only host and port are shown, of several the first."""
    first = address.partition(",")[0].strip()
    place = urlsplit(first if "://" in first else f"//{first}").netloc.rpartition("@")[2]
    return DatasetName(f"{scheme}://{place}", name)
