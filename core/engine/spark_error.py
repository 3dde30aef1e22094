"""What happened, out of what Spark tells of an error: its causes, without where in Spark's own code they were passed on."""

from __future__ import annotations

import re
from typing import Final

from stormproof.core.message import storable_text

LINES_MAX: Final = 12

_UNTOLD: Final = ("at ", "... ", "Driver stacktrace:", "An error occurred while calling ")
"""How lines begin that say where something was called, and nothing of what happened."""

_WRAPPING: Final = re.compile(
    r"^(?:Caused by: |: )?(?:[\w.$]*SparkException: )?(?:Exception thrown in awaitResult:\s*)?"
    r"(?:Job aborted due to stage failure: .*?most recent failure: "
    r"Lost task .*?\(TID \d+\) \((?P<where>.*?)\): (?:[\w.$]*SparkException: )?)?"
)
"""What Spark puts around a cause on one line: the classes that passed it on, and the numbers of stage and task."""


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
