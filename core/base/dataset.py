"""What others call a table, a topic or a folder: names by OpenLineage's naming rules, without a user or a password.

The rules know Postgres, Kafka, files and object stores. Other brokers are named alike: the server is the namespace.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import Final
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
        scheme = _SAME.get(parts.scheme, parts.scheme)
        place = parts.netloc.rpartition("@")[2]
        if scheme == "abfss" and parts.username:  # there it is the container, not a person
            place = f"{parts.username}@{place}"
        return DatasetName(f"{scheme}://{place}", parts.path.strip("/") or "/")
    return DatasetName("file", os.path.abspath(parts.path if parts.scheme == "file" else path))


def at_server(scheme: str, address: str, name: str, *, port: int, within: str = "") -> DatasetName:
    """Something at a server; of the address, a URL or ``host:port``, only host and port are shown, of several the first.

    Nothing is shown of one with an ``@`` behind the server: a password with a ``/`` or ``?`` in it stands there. `port` is
    what its clients take where the address has none. `within` is the part of the server that the name is in, as a virtual
    host; empty for the part that clients take by default.
    """
    several = address.split(",")  # the comma may be one of a password
    first = next((one for one in several if "@" in one), several[0]).strip()
    place = urlsplit(first if "://" in first else f"//{first}").netloc
    place = place.rpartition("@")[2] if "@" in place or "@" not in first else "unknown"
    if _PORT.search(place) is None:
        place = f"{place or 'localhost'}:{port}"
    return DatasetName(f"{scheme}://{place}", f"{within}/{name}" if within else name)


_SAME: Final = {"s3a": "s3", "s3n": "s3", "abfs": "abfss"}
"""Schemes of one store that have one name."""
_PORT: Final = re.compile(r":[0-9]+$")
