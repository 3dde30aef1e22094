"""Tells, by its class, whether an error that a task met outside user code is the machine's fault.

A message fails only by what a user's function, a decoder or a table's rule says of it. Every other error is sorted here,
where it is raised: a fault that may pass (a full disk, no memory, no network), a fault that somebody must mend first (a
missing module, a missing right), or neither. Only an error of the last kind leads to bisection of its batch.
"""

from __future__ import annotations

import errno
import os
import pickle
import socket
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from stormproof.core.base.errors import JobFailed, Json, MachineUnavailable, MachineUnfit, StormproofError
from stormproof.core.base.message import storable_text

OUTSIDE: Final = "outside"
"""The detail of a `JobFailed` that names an error outside user code, by class and place."""

UNFIT: Final = frozenset(
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
"""Errors that no wait mends. A run waits for any other OSError to pass, as long as it waits for a store."""

SHIP: Final = (
    "install the package in the Python of every executor (spark.pyspark.python or PYSPARK_PYTHON names it), or ship it: "
    "stormproof pack makes the archive; or spark.executorEnv.PYTHONPATH=FOLDER where every machine has the folder (with a "
    "local master: PYTHONPATH in the driver's environment), or spark.archives=ENVIRONMENT.tar.gz. All of these are set "
    "before the SparkSession starts; make none of your own, and Stormproof starts one whose workers run the driver's Python"
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
    """The fault of the machine that an error outside user code means; None where its class does not tell.

    That of `MemoryError` does not: a worker's limit (`STORMPROOF_WORKER_MEMORY_MB`) raises it for one large message, too.
    """
    if isinstance(error, StormproofError):
        return error
    if isinstance(error, ImportError):
        return _unfit(error, advice_on_import(error.name or ""))
    if isinstance(error, pickle.UnpicklingError):
        return _unfit(error, f"driver and executors need the same versions of Python and its packages: {SHIP}")
    if isinstance(error, OSError) and (number := error.errno or _errno_of(error)) is not None:
        make = _unfit if number in UNFIT else _unavailable
        return make(error, ADVICE.get(number, "see that machine's logs"))
    return None


def _errno_of(error: OSError) -> int | None:
    """The number of a network error that was raised without one; None for other errors (with a library's own text)."""
    return errno.ECONNRESET if isinstance(error, ConnectionError | TimeoutError) else None


def classified(error: Exception, where: str) -> StormproofError:
    """The error of ours to end a task with, for one that it met outside user code; `where` names the task.

    A fault of the machine is never a `JobFailed`: no batch is divided for it, and no failure of a message is counted.
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
    """For a driver's work with files of its own machine: turns an OSError in the block into the machine's fault.

    Raises:
        MachineUnavailable, MachineUnfit: in place of an OSError whose class tells.
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
    """The line of Python that raised an error, in parentheses; empty where there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" ({os.path.basename(frames[-1].filename)}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""


def unpickled(data: bytes) -> Any:
    """What the driver packed for this worker.

    Raises:
        MachineUnfit, MachineUnavailable: it cannot be unpickled; says why, and what to do. No message is at fault, since
            none was read yet.
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
    return _unfit(error, f"the topology cannot be unpickled there. Driver and executors need the same packages: {SHIP}")


def advice_on_import(module: str) -> str:
    """What to do about a module that a worker cannot import."""
    if module.partition(".")[0] in ("stormproof", ""):
        return SHIP
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
