"""The archives that carry this package to executors: the package alone, or a whole environment.

The bytes of an archive follow from the files in it: no time, owner or order of a folder is in them. An archive takes its
name only after a bare interpreter has imported from it what a task needs.
"""

from __future__ import annotations

import gzip
import hashlib
import importlib.metadata
import io
import os
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath
from typing import BinaryIO, Final

from packaging.requirements import Requirement

from stormproof.core.base.errors import UsageError
from stormproof.core.engine.executor_look import PACKAGES

OWN: Final = "stormproof"
BY_SPARK: Final = frozenset({"pyspark", "py4j"})
"""Distributions that Spark itself brings to its executors, or that the driver's JVM alone needs."""

FOR_TASKS: Final = ("kafka", "rabbitmq", "redis", "nats", "object-store")
"""Extras whose clients run inside tasks; what is not installed here is left out."""

CHECK_S: Final = 120.0
ENVIRONMENT: Final = "environment"
"""The folder beside a task in which Spark unpacks the archive of an environment."""

_EPOCH: Final = (1980, 1, 1, 0, 0, 0)
"""The earliest time that a zip can name."""

_MACHINE_OWN: Final = frozenset({"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"})
"""Files of an installation that say how and where it was made."""

_LAUNCHER: Final = """#!/bin/sh
# A Python of the executor's own machine, with the packages of this archive and no others.
here=$(CDPATH= cd -- "$(dirname -- "$0")/.." && pwd) || exit 1
PYTHONPATH="$here/lib${{PYTHONPATH:+:$PYTHONPATH}}" PYTHONNOUSERSITE=1 exec {python} "$@"
"""

_CHECK: Final = """
import importlib, sys
place = sys.argv[1]
for name in sys.argv[2:]:
    module = importlib.import_module(name)
    if name.startswith("stormproof") and not str(module.__file__).startswith(place):
        sys.exit(f"{name} came from {module.__file__}")
own = {n: str(m.__file__) for n, m in sys.modules.items() if n.partition(".")[0] == "stormproof"}
strangers = [n for n, file in own.items() if not file.startswith(place)]
if strangers:
    sys.exit(f"{strangers} came from elsewhere")
"""
_OF_TASKS: Final = (
    "stormproof",
    "stormproof.core.engine.frame",  # imports `engine.spark`, too
    "stormproof.core.engine.executors",
    "stormproof.core.source.postgres_queue",
    "stormproof.core.source.files",
    "stormproof.sinks.delta.sink",
    "stormproof.sinks.postgres.sink",
    "stormproof.core.start.preflight",
    "stormproof.trident.streaming",
)
"""What a worker imports."""


@dataclass(frozen=True, slots=True)
class Archive:
    """An archive that was made and imports. `distributions` are those in it, by name, with their versions."""

    file: Path
    bytes: int
    sha256: str
    distributions: Mapping[str, str]


def version() -> str:
    """This package's version."""
    return importlib.metadata.version(OWN)


def python_name() -> str:
    """The interpreter that an archive's packages are for, by the name that it has on a PATH."""
    return f"python{sys.version_info.major}.{sys.version_info.minor}"


def default_name(*, environment: bool) -> str:
    """The file's name: an environment's names the Python and the machine, since its packages are for these alone."""
    if not environment:
        return f"{OWN}-{version()}.zip"
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}-{platform.system().lower()}-{platform.machine()}"
    return f"{OWN}-{version()}-{tag}.tar.gz"


def pack_package(output: Path) -> Archive:
    """Write the package alone as a zip, for `spark.submit.pyFiles`; its dependencies must be on the executors.

    Raises:
        UsageError: it does not import; says what a bare interpreter said. The file is then not written.
        OSError: the file cannot be written.
    """

    def write(file: BinaryIO) -> None:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
            for name, data in sorted(own_files()):
                entry = zipfile.ZipInfo(name, _EPOCH)
                entry.create_system, entry.external_attr = 3, 0o100644 << 16
                entry.compress_type = zipfile.ZIP_DEFLATED
                archive.writestr(entry, data)

    def check(file: Path) -> None:
        paths = [str(file), *_spark_paths(), *(p for p in sys.path if p and "site-packages" in p)]
        import_in([sys.executable], str(file), paths)

    return _made(output, write, check, {OWN: version()})


def pack_environment(output: Path, python: str | None, more: Iterable[str] = ()) -> Archive:
    """Write the package with all that it needs in tasks as a tar.gz, for `spark.archives`; `more` are further distributions.

    It has no interpreter: `bin/python` in it runs `python`, by default the `python_name()` that the executor finds on its
    PATH.

    Raises:
        UsageError: a distribution is not installed here, or not as files; or the archive does not import.
        OSError: the file cannot be written.
    """
    if python is not None and not re.fullmatch(r"[A-Za-z0-9_./+-]+", python):
        raise UsageError(f"{python!r} is no name or path of a Python")
    chosen = distributions(more)

    def write(file: BinaryIO) -> None:
        with (
            gzip.GzipFile("", "wb", 6, file, mtime=0) as packed,
            tarfile.open(fileobj=packed, mode="w|", format=tarfile.PAX_FORMAT) as archive,
        ):
            _add(archive, "bin/python", _LAUNCHER.format(python=python or python_name()).encode(), 0o755)
            for name, data in sorted(own_files()):
                _add(archive, f"lib/{name}", data)
            placed: dict[str, Path] = {}
            for name, one in chosen.items():
                if name != OWN:
                    placed |= _files_of(name, one)
            for name in sorted(placed):
                _add(archive, f"lib/{name}", placed[name].read_bytes())

    def check(file: Path) -> None:
        with tempfile.TemporaryDirectory(dir=file.parent, prefix=".stormproof-check-") as folder:
            with tarfile.open(file) as archive:
                archive.extractall(folder, filter="data")
            base = Path(sys.base_prefix) / "bin"
            lib = os.path.join(folder, "lib")
            program = [str(base / python_name()), "-s"]
            import_in(program, lib, [lib, *_spark_paths()], also=PACKAGES.values())

    return _made(output, write, check, {name: one.version for name, one in chosen.items()})


def distributions(more: Iterable[str] = ()) -> dict[str, importlib.metadata.Distribution]:
    """This package, what it needs inside tasks, and `more` with what these need: by name, in order.

    Raises:
        UsageError: one of `more` is not installed here.
    """
    found: dict[str, importlib.metadata.Distribution] = {}
    _require(OWN, FOR_TASKS, found)
    for name in more:
        if not _require(name, (), found):
            raise UsageError(f"{name} is not installed here ({sys.prefix}): install it, or leave it out", package=name)
    return dict(sorted(found.items()))


def _require(name: str, extras: Iterable[str], found: dict[str, importlib.metadata.Distribution]) -> bool:
    key = re.sub(r"[-_.]+", "-", name).lower()
    if key in found or key in BY_SPARK:
        return True
    try:
        one = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    found[key] = one
    for text in one.requires or []:
        needed = Requirement(text)
        if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            _require(needed.name, needed.extras, found)
    return True


def own_files() -> Iterator[tuple[str, bytes]]:
    """This package's files, as they are installed, with the part of its metadata that tells its version."""
    yield from _below(files(OWN), OWN)
    metadata = importlib.metadata.distribution(OWN).read_text("METADATA")
    yield f"{OWN}-{version()}.dist-info/METADATA", (metadata or "").encode()


def _below(folder: Traversable, name: str) -> Iterator[tuple[str, bytes]]:
    for entry in folder.iterdir():
        inner = f"{name}/{entry.name}"
        if entry.is_dir() and entry.name != "__pycache__":
            yield from _below(entry, inner)
        elif entry.is_file() and not entry.name.endswith(".pyc"):
            yield inner, entry.read_bytes()


def _files_of(name: str, one: importlib.metadata.Distribution) -> dict[str, Path]:
    """A distribution's files below site-packages, by their places there; no program, and nothing that is this machine's."""
    listed = one.files
    if not listed or (not any(str(file).endswith((".py", ".so")) for file in listed)):
        raise UsageError(
            f"{name} is not installed as files of its own in {sys.prefix} (an editable installation, or one without a list "
            "of its files): install it from a wheel, and pack again",
            package=name,
        )
    found: dict[str, Path] = {}
    for file in listed:
        place = PurePosixPath(*file.parts)
        if ".." in place.parts or place.is_absolute() or "__pycache__" in place.parts or place.name in _MACHINE_OWN:
            continue
        path = Path(str(file.locate()))
        if path.is_file() and place.suffix != ".pyc":
            found[str(place)] = path
    return found


def _add(archive: tarfile.TarFile, name: str, data: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.mtime = len(data), mode, 0
    archive.addfile(entry, io.BytesIO(data))


def _spark_paths() -> list[str]:
    """What Spark itself puts on the path of its workers."""
    import pyspark

    return [str(path) for path in sorted((Path(pyspark.__file__).parent / "python" / "lib").glob("*.zip"))]


def import_in(program: list[str], place: str, paths: list[str], also: Iterable[str] = ()) -> None:
    """Import what tasks need in a new interpreter that has these paths alone."""
    environment = {"PYTHONPATH": os.pathsep.join(paths), "PATH": os.defpath, "PYTHONDONTWRITEBYTECODE": "1"}
    command = [*program, "-c", _CHECK, place, *_OF_TASKS, *(name for name in also if name != "pyspark")]
    try:
        done = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            text=True,
            timeout=CHECK_S,
            check=False,
            cwd=Path(place).parent,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"the archive could not be tried with {program[0]}: {error}") from error
    if done.returncode != 0:
        last = done.stderr.strip().splitlines()[-1:] or ["it ended without a word"]
        raise UsageError(
            f"the archive does not import with {program[0]}: {last[0]}. Nothing was written. Install what is missing here "
            "from wheels, and pack again",
            python=program[0],
        )


def _made(
    output: Path, write: Callable[[BinaryIO], None], check: Callable[[Path], None], inside: Mapping[str, str]
) -> Archive:
    """The archive under its name, once it was written and tried under another one beside it."""
    output = output.absolute()
    if output.is_dir():
        raise UsageError(f"{output} is a folder: name a file", file=str(output))
    handle, name = tempfile.mkstemp(dir=output.parent, prefix=".stormproof-pack-", suffix="".join(output.suffixes[-1:]))
    path = Path(name)
    try:
        with os.fdopen(handle, "w+b") as file:
            write(file)
            size = file.tell()
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        check(path)
        path.chmod(0o644)
        path.replace(output)
    finally:
        with suppress(FileNotFoundError):
            path.unlink()
    return Archive(output, size, digest, dict(inside))
