"""`jars`: Delta's jars, fetched once."""

from __future__ import annotations

from pathlib import Path

from stormproof.core.engine.jars import fetch
from stormproof.core.engine.spark_lines import spark_line
from stormproof.core.settings import Settings
from stormproof.trident.cli.output import emit, note, say


def fetch_jars(folder: str | None, *, as_json: bool) -> None:
    """Fetch the jars into the named folder, else that of the settings, else this user's; not if they are there and whole."""
    place = Path(folder) if folder is not None else Settings().delta_jars_dir
    line = spark_line()
    note(f"Delta {line.delta} for Spark {line.name} ...")
    found = fetch(place)
    report = {
        "folder": str(found.folder),
        "delta": line.delta,
        "spark": line.name,
        "fetched": found.fetched,
        "jars": [jar.name for jar in found.jars],
    }
    how = "fetched" if found.fetched else "were there"
    emit(report, as_json=as_json, text=lambda: say(f"{len(found.jars)} jars {how}, whole, in {found.folder}"))
