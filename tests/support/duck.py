"""DuckDB as a further reader of Delta tables: its own reader (delta-kernel-rs), from packages, without a download."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import duckdb


def connected() -> Any:
    """A connection that has `delta_scan`, with UTC as its time zone."""
    found = importlib.util.find_spec("duckdb_extension_delta")
    assert found is not None
    assert found.origin is not None
    extension = Path(found.origin).parent / "extensions" / f"v{duckdb.__version__}" / "delta.duckdb_extension"
    connection = duckdb.connect(config={"autoinstall_known_extensions": "false"})
    connection.execute(f"load '{extension}'")
    return connection
