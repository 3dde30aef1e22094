"""Writes docs/source_matrix.md from what each source declares: `.venv/bin/python tools/source_matrix_doc.py`."""

from __future__ import annotations

from pathlib import Path

import stormproof
from stormproof.core.source.capabilities import SOURCES, Crash, Protection, matrix, protection_of

PATH = Path(__file__).resolve().parents[1] / "docs" / "source_matrix.md"
HEAD = """# What each source promises at each crash

Made by `tools/source_matrix_doc.py` from `core/source/capabilities.py`: do not edit. The same functions decide in a run.

## How a batch is made safe

It follows from what the source's server can do:

- **ranges**: the ledger records which messages are in a batch, and they are read again from the server. Nothing is
  confirmed to it.
- **journal**: messages are written to the run's Postgres, under stable ids, before they are opened, and confirmed after
  the commit. A message that comes again is known by its id, for the source's horizon after it was resolved: it is
  confirmed again and not applied.
- **take-over**: a journal of messages without ids, which are confirmed as soon as they are written down. One that is
  delivered again before that cannot be told from a new one: exactly-once begins with the confirmation.
- **none**: a message that comes again is applied again. Exactly-once is refused.

Under at-most-once, messages without ids are confirmed before they are written down.

| source | made safe by | stable ids from | any message can be read again | server counts deliveries | note |
| --- | --- | --- | --- | --- | --- |
"""
CRASHES = """
## How often a message is applied

The driver ends, or the server is killed as in 7, when the message is:

{places}

The table has the worst case, in a sink that takes part in the guarantee; `-`: there is no such moment. With a journal
the server must keep its own promise to deliver again what was not confirmed.

| made safe by | guarantee | {numbers} |
| --- | --- |{rule}
"""


def text() -> str:
    """The page, with the sources that there are."""
    made = frozenset(stormproof.__all__)
    lines = [HEAD]
    for row in SOURCES:
        if row.made_by in made:
            able = row.able
            cells = (protection_of(able).value, able.stable_ids.value, _yes(able.reopens), _yes(able.counts_attempts))
            lines.append(f"| {row.name} (`{row.made_by}`) | {' | '.join(cells)} | {row.note} |\n")
    return "".join([*lines, _crashes(made)])


def _crashes(made: frozenset[str]) -> str:
    """One row for each way and guarantee: the sources that are made safe in one way behave alike."""
    found: dict[tuple[Protection, str], set[str]] = {}
    for row, guarantee, refused, outcomes in matrix(made):
        cells = ["refused", *[""] * (len(Crash) - 1)] if refused else [outcome.value for outcome in outcomes]
        found.setdefault((protection_of(row.able), guarantee.value), set()).add(" | ".join(cells))
    rows = [f"| {way} | {guarantee} | {cells} |\n" for (way, guarantee), same in found.items() for cells in same]
    if len(rows) > len(found):
        raise ValueError("sources that are made safe in one way behave differently: give each its rows")
    numbers = range(1, len(Crash) + 1)
    places = "\n".join(f"{number}. {crash.value}" for number, crash in zip(numbers, Crash, strict=True))
    head = CRASHES.format(places=places, numbers=" | ".join(map(str, numbers)), rule=" --- |" * len(Crash))
    return head + "".join(rows)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
