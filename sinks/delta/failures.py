"""Whether an error of delta-rs or of the file system comes from the machine and may pass, or is the table's refusal.

delta-rs wraps the operating system's errors into errors of its own, of several classes: a MERGE on a full disk raises a
`DeltaError` about Parquet. The number of the system's error stays in the text, and it decides.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from deltalake.exceptions import CommitFailedError, DeltaError

_NUMBER: Final = re.compile(r"\(os error (\d+)\)")
_NO_MEMORY: Final = "Resources exhausted"
"""What DataFusion, which runs a MERGE, says where it gets no memory, or no disk space to spill to."""

_PANIC: Final = "PanicException"
"""What PyO3 raises for a panic in delta-rs, for example where no more files may be opened. Its class cannot be imported."""

_PANIC_NUMBER: Final = re.compile(r"Os \{ code: (\d+)")

_OF_A_STORE: Final = re.compile(
    r"Generic (?:S3|GCS|MicrosoftAzure|HTTP) error|error sending request|Error performing \w+ https?://"
)
"""How the client of an object store begins its errors: the network, the server, an expired credential."""

_COLOURS: Final = re.compile(r"\x1b\[[0-9;]*m")

_OF_THE_TABLE: Final = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP})
"""A path that does not exist, or is of another kind: waiting brings no file back."""


def may_pass(error: Exception) -> bool:
    """Whether an error that left no log entry may be gone at the next try: a full or failing disk, a missing right, another
    writer's commit that came first. All other errors are the table's own answer, and stay.
    """
    if isinstance(error, CommitFailedError | OSError):
        return True
    text = str(error)
    if _OF_A_STORE.search(text):
        return True
    number = os_error(error)
    return _NO_MEMORY in text if number is None else number not in _OF_THE_TABLE


OTHERS_CHANGED: Final = "another writer changed the table meanwhile"
"""How an OSError begins that stands for such an error of Spark's."""


def is_conflict(error: BaseException | None) -> bool:
    """Whether another writer's commit came first."""
    return isinstance(error, CommitFailedError) or (
        isinstance(error, OSError) and str(error).startswith(OTHERS_CHANGED)
    )


@contextmanager
def panics_as_errors() -> Generator[None]:
    """Around a call of delta-rs: turn a panic, which `except Exception` does not catch, into an error that tells its cause.

    Raises:
        OSError: the operating system refused something, by the panic's text.
        DeltaError: any other panic.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != _PANIC:
            raise
        number = _PANIC_NUMBER.search(str(error))
        if number is None:
            raise DeltaError(f"delta-rs panicked: {error}") from error
        raise OSError(int(number[1]), f"delta-rs panicked: {error}") from error


def os_error(error: Exception) -> int | None:
    """The operating system's error number, which delta-rs has in its text; None where there is none."""
    numbers = _NUMBER.findall(str(error))
    if numbers:
        return int(numbers[-1])
    return error.errno if isinstance(error, OSError) else None


def shown(error: Exception) -> str:
    """An error's text in one line, without the colours that delta-rs puts into some of them."""
    return " ".join(_COLOURS.sub("", str(error)).split())
