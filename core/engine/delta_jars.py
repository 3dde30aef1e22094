"""Delta's jars for Spark: find them, check that they are whole, and fetch them once."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import filelock

from stormproof.core.base.errors import SettingsError, StoreUnavailable
from stormproof.core.base.trusted_paths import require_trusted, user_cache
from stormproof.core.engine.java import clone_folder, find_java
from stormproof.core.engine.spark_lines import spark_line

MANIFEST: Final = "manifest.json"
FETCH_COMMAND: Final = "stormproof jars"
# Delta declares a second Hadoop, Parquet, Jackson and log4j beside Spark's own; without those it runs on Spark's.
_EXCLUDES: Final = "org.*:*,com.*:*,commons-*:*,javax.*:*,io.airlift:*"
_TIMEOUT_S: Final = 600
_TELLING: Final = re.compile(
    r"error|unresolved|not found|refused|unknown host|timed out|certificate|exception", re.IGNORECASE
)
_TELLING_LINES: Final = 6


@dataclass(frozen=True, slots=True)
class FetchedJars:
    """What `fetch` found or fetched."""

    folder: Path
    jars: tuple[Path, ...]
    fetched: bool
    """Whether the network was used."""


def user_jars_folder() -> Path:
    """This user's folder for the jars of this Delta and this Spark; raises as `user_cache` does."""
    line = spark_line()
    return user_cache() / "jars" / f"delta-{line.delta}-spark-{line.name}"


def delta_jars(folder: Path | None = None) -> list[Path]:
    """Delta's jars, for `spark.jars`: from `folder`; else from the first of these that is whole: `.jars` in the working
    folder, `.jars` in the clone, the folder that `fetch` fills.

    Each must have Delta's two main jars, for the installed line of Spark. One that `fetch` has filled is checked against
    its list. The working folder's `.jars` is used only where no other user can have put it there.

    Raises:
        SettingsError: they are missing or incomplete, or another user could have written them; says what to do.
    """
    if folder is not None:
        places = [folder]
    else:
        clone, here = clone_folder(), Path.cwd() / ".jars"
        places = [here, *([clone / ".jars"] if clone is not None else []), user_jars_folder()]
        if here.exists() and (clone is None or here.resolve() != (clone / ".jars").resolve()):
            for path in (here, *sorted(here.glob("*.jar"))):
                require_trusted(
                    path, "what is in a jar runs as you", "or name the folder to use in STORMPROOF_DELTA_JARS_DIR"
                )
    problems: list[str] = []
    for place in dict.fromkeys(p.absolute() for p in places):
        problem = _missing(place)
        if problem is None:
            return sorted(place.glob("*.jar"))
        problems.append(f"{place}: {problem}")
    into = "" if folder is None else f" {folder}"
    raise SettingsError(
        f"Delta's jars are not there ({'; '.join(problems)}); fetch them with: {FETCH_COMMAND}{into}",
        places=[str(p) for p in places],
    )


def _missing(folder: Path) -> str | None:
    """What the folder lacks; None where it is whole."""
    if not folder.is_dir():
        return "no such folder"
    found = {path.name: path for path in folder.glob("*.jar")}
    manifest = folder / MANIFEST
    main = (spark_line().artifact, "delta-storage")
    absent = [part for part in main if not any(part in name for name in found)]
    if absent:
        return f"no jar of {', '.join(absent)}"
    if not manifest.exists():
        return None
    try:
        listed: dict[str, str] = json.loads(manifest.read_text())["jars"]
    except (ValueError, KeyError):
        return f"{MANIFEST} cannot be read"
    wrong = sorted(name for name, mark in listed.items() if name not in found or not _is_whole(found[name], mark))
    return f"missing or cut off: {', '.join(wrong)}" if wrong else None


def _is_whole(jar: Path, mark: str) -> bool:
    """Whether a jar is the one that was fetched, by its SHA-256."""
    return _sha256(jar) == mark


def _sha256(jar: Path) -> str:
    with jar.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def fetch(folder: Path | None = None) -> FetchedJars:
    """Delta's jars in `folder`, by default this user's; the network is used only where they are not there and whole.

    One process at a time fetches. Spark's own resolver does the work, so it uses the mirror or proxy that is set up for it,
    and compares the registry's checksums. The list that makes the folder valid is written last.

    Raises:
        SettingsError: there is no Java or no bash, or the folder cannot be written; nothing was changed.
        StoreUnavailable: the registry did not give the jars; nothing was changed.
    """
    folder = (folder or user_jars_folder()).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with filelock.FileLock(folder / ".lock", timeout=2 * _TIMEOUT_S):
            fetched = not (folder / MANIFEST).exists() or _missing(folder) is not None
            if fetched:
                _fill(folder)
    except filelock.Timeout as error:
        raise StoreUnavailable(
            f"another process has fetched jars into {folder} for {2 * _TIMEOUT_S} s; find it with: fuser {folder}/.lock",
            path=str(folder),
        ) from error
    except OSError as error:
        raise SettingsError(
            f"Delta's jars cannot be put into {folder}: {error.strerror or error}; name a folder that this user may write: "
            f"{FETCH_COMMAND} FOLDER, and set STORMPROOF_DELTA_JARS_DIR to it",
            path=str(folder),
        ) from error
    return FetchedJars(folder, tuple(delta_jars(folder)), fetched)


def _fill(folder: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as work:
        jars = _resolve(Path(work))
        (folder / MANIFEST).unlink(missing_ok=True)
        for jar in folder.glob("io.delta_*.jar"):  # of another Spark or Delta: a session would load both
            jar.unlink()
        for jar in jars:
            jar.replace(folder / jar.name)
        listed = {jar.name: _sha256(folder / jar.name) for jar in jars}
        manifest = Path(work) / MANIFEST
        content = {"delta": spark_line().delta, "spark": spark_line().name, "jars": listed}
        manifest.write_text(json.dumps(content, indent=1, sort_keys=True))
        manifest.replace(folder / MANIFEST)


def _resolve(work: Path) -> list[Path]:
    """The package's jars, resolved by spark-submit into a private folder: two runs in one folder break each other."""
    if shutil.which("bash") is None:
        raise SettingsError(
            "there is no bash here, which Spark's starter needs; install it, as in: apt-get install bash"
        )
    problem, line = "", spark_line()
    for attempt in ("shared", "private"):
        # First with the user's own Maven folder, which may be the machine's only supply. An incomplete package in there (a
        # description without its jar) ends the resolver, so the second try is without that folder.
        ivy = work / attempt
        options = [] if attempt == "shared" else [f"-Duser.home={work}"]
        answer = _submit(ivy, options, work)
        jars = sorted((ivy / "jars").glob("*.jar"))
        torn = [jar.name for jar in jars if not _is_archive(jar)]
        if answer.returncode == 0 and len(jars) == line.jars and not torn:
            return jars
        lines = [line.strip() for line in answer.stdout.splitlines() if _TELLING.search(line)]
        telling = " | ".join(dict.fromkeys(lines[:_TELLING_LINES])) or answer.stdout[-500:].strip()
        whole = len(jars) - len(torn)
        problem = f"exit status {answer.returncode}, {whole} of {line.jars} jars are whole: {telling}"
    raise StoreUnavailable(
        f"Delta {line.delta}'s jars for Spark {line.name} could not be fetched ({problem}); check that the Maven "
        "registry is reached from here (a proxy or mirror of Spark's or Ivy's settings is used), and try again; or copy "
        "them from a machine that has them, and name their folder in STORMPROOF_DELTA_JARS_DIR",
        delta=line.delta,
    )


def _is_archive(jar: Path) -> bool:
    """Whether every entry of the jar can be read, with its checksum."""
    try:
        with zipfile.ZipFile(jar) as archive:
            return archive.testzip() is None
    except zipfile.BadZipFile:
        return False


def _submit(ivy: Path, options: list[str], work: Path) -> subprocess.CompletedProcess[str]:
    java, line = find_java(), spark_line()
    # A platform's, too. The name is private; the script around it is not.
    from pyspark.find_spark_home import _find_spark_home  # pyright: ignore[reportPrivateUsage]

    home = Path(_find_spark_home())
    script = work / "nothing.py"
    script.write_text("")
    command = [
        str(home / "bin" / "spark-submit"),
        "--master", "local[1]",
        "--packages", f"io.delta:{line.artifact}:{line.delta}",
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
    try:
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
    except subprocess.TimeoutExpired as error:
        raise StoreUnavailable(
            f"Delta {line.delta}'s jars did not come within {_TIMEOUT_S} s; check that the Maven registry is reached"
        ) from error
