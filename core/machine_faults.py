"""Whose fault an error is that a task met outside user code: the machine's, by class, or nobody's that is known.

A message fails only by what a user's function, a decoder or a table's rule says of it. Whatever else a task meets is
sorted here, where it is raised: what may come back (a full disk, no memory, no network), what somebody must change first
(a module, a right), and what tells neither. Only the last kind is still met by bisection.
"""

from __future__ import annotations

import errno
import os
import pickle
import re
import socket
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from stormproof.core.errors import (
    JobFailed,
    Json,
    MachineUnavailable,
    MachineUnfit,
    StormproofError,
)
from stormproof.core.message import storable_text

OUTSIDE: Final = "outside"
"""The detail of a `JobFailed` that names an error outside user code: its class and the place where it was raised."""

_UNFIT: Final = frozenset(
    {
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOEXEC,
    }
)
"""What no wait mends. Every other OSError is met again for as long as a store may stay away."""

_SHIP: Final = (
    "install the package in the Python of every executor (spark.pyspark.python or PYSPARK_PYTHON names it), or ship it: "
    "spark.executorEnv.PYTHONPATH=FOLDER where every machine has the folder (with a local master: PYTHONPATH in the "
    "driver's environment), or spark.archives=ENVIRONMENT.tar.gz. All of these are set before the SparkSession starts; make "
    "none of your own, and Stormproof starts one whose workers run the driver's Python"
)

ADVICE: Final[dict[int, str]] = {
    errno.ENOSPC: "make room on that disk",
    errno.EDQUOT: "make room within that quota, or raise it",
    errno.EFBIG: "raise the limit of a file's size (ulimit -f)",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the machine's limit of open files",
    errno.ENOMEM: "give the machine more memory, or its workers less work (STORMPROOF_PARALLELISM)",
    errno.EAGAIN: "raise the limit of processes (ulimit -u)",
    errno.EROFS: "mount it for writing, or name another folder",
    errno.EACCES: "grant the user who runs the executors the right to write there, or name another folder",
    errno.EPERM: "grant the user who runs the executors the right to do so",
    errno.ENOENT: "name a folder that the driver and every executor reach (STORMPROOF_STAGING_DIR), and keep it",
}


def fault_of(error: BaseException) -> StormproofError | None:
    """The machine's fault that an error outside user code is; None where it does not tell.

    `MemoryError` does not: a worker's bound (`STORMPROOF_WORKER_MEMORY_MB`) raises it for one large message, too.
    """
    if isinstance(error, StormproofError):
        return error
    if isinstance(error, ImportError):
        return _unfit(error, advice_on_import(error.name or ""))
    if isinstance(error, pickle.UnpicklingError):
        return _unfit(error, f"driver and executors need the same versions of Python and its packages: {_SHIP}")
    if isinstance(error, OSError) and (number := error.errno or _errno_of(error)) is not None:
        make = _unfit if number in _UNFIT else _unavailable
        return make(error, ADVICE.get(number, "see that machine's logs"))
    return None


def _errno_of(error: OSError) -> int | None:
    """The number of an error of the network that was raised without one; None for any other (a library's own text)."""
    return errno.ECONNRESET if isinstance(error, ConnectionError | TimeoutError) else None


def classified(error: Exception, where: str) -> StormproofError:
    """The error that a task ends with in place of one that it met outside user code. `where` is the task.

    A fault of the machine is never a `JobFailed`, so no batch is divided for it and no message counts a failure.
    """
    fault = fault_of(error)
    if fault is not None:
        return fault
    return JobFailed(
        f"{where} failed: {type(error).__name__}: {storable_text(error)}{place_of(error)}",
        **{OUTSIDE: signature(error)},
    )


@contextmanager
def own_faults() -> Generator[None]:
    """Around what a driver does with its own machine's files: an OSError there is the machine's fault, by its class.

    Raises:
        MachineUnavailable, MachineUnfit: in place of an OSError that tells.
    """
    try:
        yield
    except OSError as error:
        fault = fault_of(error)
        if fault is None:
            raise
        raise fault from error


def signature(error: BaseException) -> str:
    """An error's class and the place where it was raised: the same for one cause, whatever message was in hand."""
    return f"{type(error).__name__}{place_of(error)}"


def place_of(error: BaseException) -> str:
    """The last line of Python that raised it, in parentheses; empty where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""


def unpickled(data: bytes) -> Any:
    """What the driver packed for this worker. That it cannot be unpickled is no message's fault: none was read yet.

    Raises:
        MachineUnfit, MachineUnavailable: why not, and what to do.
    """
    try:
        return pickle.loads(data)  # noqa: S301 - what the driver of this very job packed
    except Exception as error:
        raise _unfit_to_unpickle(error) from error


def _unfit_to_unpickle(error: Exception) -> StormproofError:
    fault = fault_of(error)
    if fault is not None:
        return fault
    if isinstance(error, MemoryError):
        return _unavailable(error, ADVICE[errno.ENOMEM])
    return _unfit(
        error, f"the topology cannot be unpickled there. Driver and executors need the same packages: {_SHIP}"
    )


def advice_on_import(module: str) -> str:
    """What to do about a module that a worker cannot import."""
    if module.partition(".")[0] in ("stormproof", ""):
        return _SHIP
    return (
        f"install {module.partition('.')[0]!r} in the Python of every executor, or ship it there: "
        "spark.executorEnv.PYTHONPATH=FOLDER, or spark.archives=ENVIRONMENT.tar.gz"
    )


def _details(error: BaseException) -> dict[str, Json]:
    found: dict[str, Json] = {"host": socket.gethostname(), "error": type(error).__name__}
    if isinstance(error, OSError) and error.errno is not None:
        found["errno"] = errno.errorcode.get(error.errno, str(error.errno))
        if isinstance(error.filename, str):
            found["file"] = error.filename
    if isinstance(error, ImportError) and error.name:
        found["module"] = error.name
    return found


def _unavailable(error: BaseException, advice: str) -> MachineUnavailable:
    return MachineUnavailable(_told(error, advice), **_details(error))


def _unfit(error: BaseException, advice: str) -> MachineUnfit:
    return MachineUnfit(_told(error, advice), **_details(error))


def _told(error: BaseException, advice: str) -> str:
    return (
        f"{socket.gethostname()} lacks what a run needs: {type(error).__name__}: {storable_text(error)}{place_of(error)}. "
        f"No message is to blame, none counts a failure, and nothing is half written. What to do: {advice}"
    )


# -- what only Spark tells: errors outside the package's own code in a worker, and of the JVM ---------------------------

_IMPORT: Final = re.compile(r"(?:ModuleNotFoundError|ImportError): (?P<text>[^\n]*)")
_MODULE: Final = re.compile(r"[Nn]o module named '?(?P<name>[\w.]+)'?")
_UNFIT_TEXTS: Final = (
    ("Read-only file system", errno.EROFS),
    ("Permission denied", errno.EACCES),
    ("Operation not permitted", errno.EPERM),
)
_UNAVAILABLE_TEXTS: Final = (
    ("No space left on device", errno.ENOSPC),
    ("Disk quota exceeded", errno.EDQUOT),
    ("File too large", errno.EFBIG),
    ("Cannot allocate memory", errno.ENOMEM),
    ("Too many open files", errno.EMFILE),
    ("unable to create native thread", errno.EAGAIN),
    ("Resource temporarily unavailable", errno.EAGAIN),
)
_OTHER_PYTHON: Final = ("PYTHON_VERSION_MISMATCH", "Cannot run program", "UnpicklingError")


def fault_told_by_spark(text: str, told: str) -> StormproofError | None:
    """The machine's fault in the text of an error of Spark; None where it tells of none.

    `told` is what people are shown of it. Only for errors that no task of ours raised: those carry their own class.
    """
    missing = _IMPORT.search(text)
    if missing is not None:
        module = _MODULE.search(missing["text"])
        name = "" if module is None else module["name"]
        return _by_spark(MachineUnfit, told, advice_on_import(name), **({"module": name} if name else {}))
    if any(known in text for known in _OTHER_PYTHON):
        return _by_spark(MachineUnfit, told, f"executors need the driver's Python and packages: {_SHIP}")
    for known, number in _UNAVAILABLE_TEXTS:
        if known in text:
            return _by_spark(MachineUnavailable, told, ADVICE[number], errno=errno.errorcode[number])
    for known, number in _UNFIT_TEXTS:
        if known in text:
            return _by_spark(MachineUnfit, told, ADVICE[number], errno=errno.errorcode[number])
    return None


def _by_spark(
    cls: type[MachineUnavailable | MachineUnfit], told: str, advice: str, **details: Json
) -> MachineUnavailable | MachineUnfit:
    return cls(
        f"Spark's workers cannot run a task: {told}. No message is to blame, none counts a failure, and nothing is half "
        f"written. What to do: {advice}",
        **details,
    )
