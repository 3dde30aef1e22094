"""`jars`: Delta's jars, fetched once. `pack`: the archive that carries the package to executors, what to pass to Spark."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stormproof.core.base.errors import UsageError
from stormproof.core.engine import archive
from stormproof.core.engine.archive import ENVIRONMENT, Archive
from stormproof.core.engine.delta_jars import fetch
from stormproof.core.engine.spark_lines import spark_line
from stormproof.core.start.settings import Settings
from stormproof.trident.cli.output import emit, note, say


def make_archive(
    output: str | None, *, environment: bool, python: str | None, more: Sequence[str] | None, as_json: bool
) -> None:
    """Write the archive, once it imports in a bare interpreter."""
    if not environment and (python is not None or more):
        raise UsageError("--python and --with are for a whole environment: add --environment")
    file = Path(output or archive.default_name(environment=environment))
    wanted = ".tar.gz" if environment else ".zip"
    if not file.name.endswith(wanted):
        raise UsageError(f"--output {file.name}: Spark goes by the name's end; this one has to be {wanted}")
    note(f"packing, and importing from the archive with a bare {archive.python_name()} ...")
    made = archive.pack_environment(file, python, more or ()) if environment else archive.pack_package(file)
    settings = settings_for(made, environment=environment)
    report = {
        "file": str(made.file),
        "bytes": made.bytes,
        "sha256": made.sha256,
        "python": archive.python_name(),
        "distributions": made.distributions,
        "settings": settings,
    }
    emit(report, as_json=as_json, text=lambda: say(_text(made, settings, environment=environment)))


def settings_for(made: Archive, *, environment: bool) -> dict[str, str]:
    """Spark's settings that send the archive to executors and use it there."""
    if not environment:
        return {"spark.submit.pyFiles": str(made.file)}
    return {
        "spark.archives": f"{made.file}#{ENVIRONMENT}",
        "spark.pyspark.python": f"./{ENVIRONMENT}/bin/python",
    }


def _text(made: Archive, settings: dict[str, str], *, environment: bool) -> str:
    needs = (
        f"{archive.python_name()} (or what --python names); this archive has {len(made.distributions)} packages"
        if environment
        else f"{archive.python_name()} with this package's dependencies; this archive has the package alone"
    )
    options = "\n".join(f"  --conf {name}={value}" for name, value in settings.items())
    return (
        f"{made.file}: {made.bytes / 2**20:.1f} MiB, sha256 {made.sha256}\n"
        f"It imports. Executors need {needs}.\n"
        f"Pass to stormproof run, doctor --cluster or spark-submit:\n{options}"
    )


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
