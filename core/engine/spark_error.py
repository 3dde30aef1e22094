"""The error that a Spark job ended with: one of ours that a task raised, a machine's fault that Spark reports, or JobFailed.

A worker's error reaches the driver only as text, wrapped by Spark. `carried` makes a text of one of ours that survives this.
"""

from __future__ import annotations

import errno
import json
import re
from typing import Any, Final

from stormproof.core.base.errors import JobFailed, Json, MachineUnavailable, MachineUnfit, StormproofError
from stormproof.core.base.machine_faults import ADVICE, SHIP, UNFIT, advice_on_import
from stormproof.core.base.message import storable_text

LINES_MAX: Final = 12

_CARRIED: Final = "stormproof-error"
_CARRIED_PATTERN: Final = re.compile(rf"<{_CARRIED}>(.*?)</{_CARRIED}>", re.DOTALL)

_UNTOLD: Final = ("at ", "... ", "Driver stacktrace:", "An error occurred while calling ")
"""How lines begin that say only where something was called, not what happened."""

_WRAPPING: Final = re.compile(
    r"^(?:Caused by: |: )?(?:[\w.$]*SparkException: )?(?:Exception thrown in awaitResult:\s*)?"
    r"(?:Job aborted due to stage failure: .*?most recent failure: "
    r"Lost task .*?\(TID \d+\) \((?P<where>.*?)\): (?:[\w.$]*SparkException: )?)?"
)
"""What Spark puts around a cause on one line: the classes that passed it on, and the numbers of stage and task."""

_IMPORT: Final = re.compile(r"(?:ModuleNotFoundError|ImportError): (?P<text>[^\n]*)")
_MODULE: Final = re.compile(r"[Nn]o module named '?(?P<name>[\w.]+)'?")
_NUMBERS: Final = {
    "No space left on device": errno.ENOSPC,
    "Disk quota exceeded": errno.EDQUOT,
    "File too large": errno.EFBIG,
    "Cannot allocate memory": errno.ENOMEM,
    "Too many open files": errno.EMFILE,
    "unable to create native thread": errno.EAGAIN,
    "Resource temporarily unavailable": errno.EAGAIN,
    "Read-only file system": errno.EROFS,
    "Permission denied": errno.EACCES,
    "Operation not permitted": errno.EPERM,
}
"""The error numbers that mean a fault of the machine, by the text in which Spark or the JVM reports each.

Not by `os.strerror`: it speaks the language of the driver's locale, and the executors' texts are English.
"""

_OTHER_PYTHON: Final = ("PYTHON_VERSION_MISMATCH", "Cannot run program", "UnpicklingError")
_LOST: Final = re.compile(r"Lost task [^\n]*?\(TID \d+\) \((?P<host>[^ )\n]+)")


def fault_in(text: str | None) -> StormproofError | None:
    """The error of ours that a text carries; None where it carries none."""
    found = None if text is None else _CARRIED_PATTERN.search(text)
    return None if found is None else _brought(found[1])


def raised_by_job(error: Exception) -> StormproofError:
    """The error to raise for a job that ended with this one."""
    text = str(error)
    found = fault_in(text)
    if found is not None:
        return found
    told = what_happened(text)
    return fault_told_by_spark(text, told) or JobFailed(f"the Spark job failed: {told}", error=type(error).__name__)


def carried(error: StormproofError) -> str:
    """An error as a text that survives Spark's wrapping."""
    parts: list[Json] = [error.kind.value, error.message, dict(error.details)]
    return f"<{_CARRIED}>{json.dumps(parts).replace('<', chr(92) + 'u003c')}</{_CARRIED}>"


def _brought(text: str) -> StormproofError:
    kind, message, details = json.loads(text)
    todo: list[type[StormproofError]] = [StormproofError]
    for cls in todo:  # it grows; parents come before children, which may share a parent's kind
        if cls.kind.value == kind:
            return cls(message, **details)
        todo.extend(cls.__subclasses__())
    return JobFailed(message, **details)


def condition_of(error: Any) -> str:
    """The name of an error's condition, as Spark's documentation has it; empty where it has none."""
    ask = getattr(error, "getCondition", None) or error.getErrorClass  # its name before Spark 4.0
    return str(ask() or "")


def what_happened(text: str) -> str:
    """The end of a Python traceback where there is one, else Spark's causes, each once, and on which executor.

    The first line is what a list of messages has room for.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    starts = [i for i, line in enumerate(lines) if "Traceback (most recent call last)" in line]
    if starts:
        lines = lines[starts[-1] + 1 :]
        end = next((i for i, line in enumerate(lines) if not line.startswith((" ", "\t"))), len(lines) - 1)
        return storable_text("\n".join(lines[max(0, end - 2) : end + 1]))
    told: list[str] = []
    for line in lines:
        if line.lstrip().startswith(_UNTOLD):
            continue
        cause = _WRAPPING.sub(_where, line.strip())
        if cause and not any(cause in earlier for earlier in told):
            told.append(cause)
    told = told or lines  # nothing but wrapping: then that is what is known
    return storable_text("\n".join([*told[:LINES_MAX], *told[LINES_MAX:][-1:]]))


def _where(wrapping: re.Match[str]) -> str:
    return f"on {wrapping['where']}: " if wrapping["where"] else ""


def fault_told_by_spark(text: str, told: str) -> StormproofError | None:
    """The machine's fault that an error of Spark reports; None where it reports none.

    `text` is the whole error, `told` the part that is shown. Only for errors that no task of ours raised: those carry their
    own class.
    """
    missing = _IMPORT.search(text)
    if missing is not None:
        module = _MODULE.search(missing["text"])
        name = "" if module is None else module["name"]
        return _by_spark(MachineUnfit, text, told, advice_on_import(name), **({"module": name} if name else {}))
    if any(known in text for known in _OTHER_PYTHON):
        return _by_spark(MachineUnfit, text, told, f"executors need the driver's Python and packages: {SHIP}")
    for known, number in _NUMBERS.items():
        if known in text:
            cls = MachineUnfit if number in UNFIT else MachineUnavailable
            return _by_spark(cls, text, told, ADVICE[number], errno=errno.errorcode[number])
    return None


def _by_spark(
    cls: type[MachineUnavailable | MachineUnfit], text: str, told: str, advice: str, **details: Json
) -> MachineUnavailable | MachineUnfit:
    lost = _LOST.search(text)
    where = "" if lost is None else f" on {lost['host']}"
    return cls(
        f"Spark's workers{where} cannot run a task: {told}. No message is to blame, none counts a failure, and nothing is "
        f"half written. What to do: {advice}",
        **details,
        **({} if lost is None else {"host": lost["host"]}),
    )
