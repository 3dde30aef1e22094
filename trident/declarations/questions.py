"""The audit's questions: each is one view in `migrations/views.sql`, with the lines above it.

The command `stormproof audit NAME` with its options, the page, the keys of `--json`, the entry in the report for an auditor
and the reference are made from it. The lines, each `-- KEY: VALUE`, and each `--   ` goes on with the one before:

| key | value |
| --- | --- |
| `question` | the command's name; its view is `audit_NAME`, and ends at the next question |
| `asks` | the question, as the page and the report have it |
| `page` | its own page's route; without it, the page of all questions answers it |
| `says`, `more`, `example` | the command's help |
| `order` | how rows are sorted. Without it the command is written by hand, and only listed here |
| `time`, `txid` | columns for `--since`, `--until` and `--txid`, where they are not called `at` and `txid` |
| `counts` | by what the report counts: columns, or `day`; several by `;` |
| `counted` | another view of the same rows, which is faster to count by group |
| `fails` | a column, or `COLUMN=VALUE`: the exit status is 1 if a row has it |

What a column means is its comment, which is also the help of the option that filters by it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

SCHEMA: Final = "stormproof"
FILTERS: Final = ("what", "source", "sink", "message", "reason", "component", "error_class", "state")
"""A view can be filtered by those of these columns that it has."""
SPANS: Final = ("minute", "hour", "day")
_VIEWS: Final = Path(__file__).parents[2] / "migrations" / "views.sql"
_COMMENT: Final = re.compile(
    r"^comment on (?:view|column) stormproof\.(audit_[\w.]+) is '((?:[^']|'')*)';$", re.MULTILINE
)
_HEAD: Final = re.compile(r"^-- question: (?:.*\n)(?:--.*\n)*", re.MULTILINE)


@dataclass(frozen=True)
class Question:
    """A question, and how its view is read. Names are append-only, and so are the columns."""

    name: str
    asks: str
    columns: Mapping[str, str]
    """What each column means."""
    page: str = "question"
    says: str = ""
    more: str = ""
    example: str = ""
    order: str = ""
    time: str | None = None
    txid: str | None = None
    counts: tuple[tuple[str, ...], ...] = ()
    counted: str | None = None
    fails: str | None = None

    @cached_property
    def view(self) -> str:
        """The view's name, with its schema."""
        return f"{SCHEMA}.audit_{self.name.replace('-', '_')}"

    @cached_property
    def command(self) -> str:
        """The command that answers it."""
        return f"stormproof audit {self.name}"

    @cached_property
    def filters(self) -> tuple[str, ...]:
        """The columns that it can be filtered by, beside topology, time and txid."""
        return tuple(name for name in FILTERS if name in self.columns)

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """What its rows can be counted by."""
        return ("topology", *self.filters, *(SPANS if self.time else ()))

    @property
    def help(self) -> str:
        """The command's help."""
        example = f"Example: {self.example}" if self.example else ""
        return "\n\n".join([self.says, *filter(None, [" ".join(filter(None, (self.more, example)))])])

    def is_failed_by(self, row: Mapping[str, Any]) -> bool:
        """Whether a row makes the exit status 1."""
        column, equals, value = (self.fails or "").partition("=")
        found = row.get(column)
        return found == value if equals else found is not None


def described(views: str | None = None) -> dict[str, str]:
    """What each of the audit's views and each of their columns is: by `VIEW` and by `VIEW.COLUMN`."""
    return {name: told.replace("''", "'") for name, told in _COMMENT.findall(views or _VIEWS.read_text("utf-8"))}


def declared(views: str) -> dict[str, Question]:
    """The questions that the text of views declares, by their names and in their order."""
    told = described(views)
    heads = map(_lines_of, _HEAD.findall(views))
    return {head["question"]: _question(head, told) for head in heads}


def _lines_of(head: str) -> dict[str, str]:
    """The keys and values of the lines above a view."""
    whole = head.replace("\n--   ", " ").splitlines()
    parts = (line.removeprefix("-- ").partition(": ") for line in whole)
    return {key: value for key, _, value in parts}


def _question(head: dict[str, str], told: Mapping[str, str]) -> Question:
    name = head.pop("question")
    start = f"audit_{name.replace('-', '_')}."
    columns = {one.removeprefix(start): meaning for one, meaning in told.items() if one.startswith(start)}
    for column, usual in (("time", "at"), ("txid", "txid")):
        if usual in columns:
            head.setdefault(column, usual)
    counts = tuple(tuple(by.split(", ")) for by in head.pop("counts", "").split("; ") if by)
    return Question(name, columns=columns, counts=counts, **head)


QUESTIONS: Final[Mapping[str, Question]] = declared(_VIEWS.read_text("utf-8"))
"""By their names and in their order."""
