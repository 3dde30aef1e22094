"""Fetch Delta's jars once into a folder: ``python -m stormproof.core.engine.fetch_jars FOLDER``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

import filelock
import pyspark

from stormproof.core.engine.java import DELTA_VERSION, MANIFEST, clone_folder, delta_jars, find_java
from stormproof.core.errors import SettingsError, StormproofError

# Delta declares a second Hadoop, Parquet, Jackson and log4j beside Spark's own; without those it runs on Spark's.
_EXCLUDES: Final = "org.*:*,com.*:*,commons-*:*,javax.*:*,io.airlift:*"
_JARS: Final = 7
_TIMEOUT_S: Final = 600
_OUTPUT_MAX: Final = 3_000


def fetch(folder: Path) -> list[Path]:
    """Delta's jars in `folder`; from the network only where they are not there already, and by one process at a time.

    Spark's own resolver does it, so a mirror or proxy set up for that is used.

    Raises:
        SettingsError: there is no Java, or the registry did not give them; the folder is as it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(folder / ".lock", timeout=2 * _TIMEOUT_S):
        if (folder / MANIFEST).exists():
            try:
                return delta_jars(folder)
            except SettingsError:  # incomplete: fetched again below, which says so where it fails
                (folder / MANIFEST).unlink()
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as work:
            jars = _resolve(Path(work))
            for jar in jars:
                jar.replace(folder / jar.name)
            listed = {jar.name: (folder / jar.name).stat().st_size for jar in jars}
            manifest = Path(work) / MANIFEST
            manifest.write_text(json.dumps({"delta": DELTA_VERSION, "jars": listed}, indent=1, sort_keys=True))
            manifest.replace(folder / MANIFEST)
        return delta_jars(folder)


def _resolve(work: Path) -> list[Path]:
    """Let spark-submit resolve the package into a private folder: two runs on a shared one kill each other."""
    problem = ""
    for attempt in ("shared", "private"):
        # First with the user's own Maven folder, which may be a machine's only supply; but a half-filled one there (a
        # description without its jar) ends the resolver, so once more without it.
        ivy = work / attempt
        options = [] if attempt == "shared" else [f"-Duser.home={work}"]
        answer = _submit(ivy, options, work)
        jars = sorted((ivy / "jars").glob("*.jar"))
        if answer.returncode == 0 and len(jars) == _JARS:
            return jars
        problem = (
            f"exit status {answer.returncode}, {len(jars)} of {_JARS} jars; {answer.stdout[-_OUTPUT_MAX:].strip()}"
        )
    raise SettingsError(
        f"Delta {DELTA_VERSION}'s jars could not be fetched ({problem}); check that the Maven registry is reached, or "
        "name a folder that has them in STORMPROOF_DELTA_JARS_DIR"
    )


def _submit(ivy: Path, options: list[str], work: Path) -> subprocess.CompletedProcess[str]:
    java = find_java()
    home = Path(pyspark.__file__).parent
    spark_version = ".".join(pyspark.__version__.split(".")[:2])
    script = work / "nothing.py"
    script.write_text("")
    command = [
        str(home / "bin" / "spark-submit"),
        "--master", "local[1]",
        "--packages", f"io.delta:delta-spark_{spark_version}_2.13:{DELTA_VERSION}",
        "--conf", f"spark.jars.excludes={_EXCLUDES}",
        "--conf", f"spark.jars.ivy={ivy}",
        str(script),
    ]  # fmt: skip
    tool_options = [os.environ.get("JAVA_TOOL_OPTIONS", ""), *java.options]
    environment = {
        **os.environ,
        "JAVA_HOME": str(java.home),
        "SPARK_HOME": str(home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
        "JAVA_TOOL_OPTIONS": " ".join(filter(None, tool_options)),
        "SPARK_SUBMIT_OPTS": " ".join([os.environ.get("SPARK_SUBMIT_OPTS", ""), *options]),
    }
    return subprocess.run(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=_TIMEOUT_S,
    )


def main(arguments: list[str]) -> int:
    """Fetch into the folder that is named, or into `.jars` of the clone."""
    if not shutil.which("bash"):
        print("Spark's starter needs bash; install it", file=sys.stderr)
        return 1
    folder = Path(arguments[0]) if arguments else clone_folder() / ".jars"
    try:
        jars = fetch(folder.absolute())
    except (StormproofError, filelock.Timeout) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{len(jars)} jars of Delta {DELTA_VERSION} in {folder}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
