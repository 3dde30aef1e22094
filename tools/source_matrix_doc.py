"""Writes docs/source_matrix.md from what each source declares: `.venv/bin/python tools/source_matrix_doc.py`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import stormproof
from stormproof.core.contract.capabilities import SOURCES, Crash, DeliverySemantics, Protection, matrix, protection_of

PATH = Path(__file__).resolve().parents[1] / "docs" / "source_matrix.md"
HEAD = """# What each source promises at each crash

Made by `tools/source_matrix_doc.py` from `core/contract/capabilities.py`: do not edit. The same functions decide in a run.

## How a batch is made safe

- **ranges**: the ledger records which messages are in a batch, and they are read again from the server.
- **journal**: messages are written to the run's Postgres, under stable ids, before they are opened, and confirmed after
  the commit. A message that comes again within the source's horizon after it was resolved is confirmed again and not
  applied.
- **take-over**: a journal of messages without ids, which are confirmed as soon as they are written down. One that is
  delivered again before that cannot be told from a new one: exactly-once begins with the confirmation.
- **none**: a message that comes again is applied again. Exactly-once is refused.

Under at-most-once, messages without ids are confirmed before they are written down.

| source | made safe by | stable ids from |
| --- | --- | --- |
"""
CRASHES = """
## How often a message is applied

The driver ends, or the server is killed as in 7, when the message is:

{places}

The worst case; a message is applied once at all other moments. With a journal the server must deliver again what was
not confirmed.

| made safe by | {guarantees} |
| --- |{rule}
"""


def text() -> str:
    """The page, with the sources that there are."""
    made = frozenset(stormproof.__all__)
    lines = [HEAD]
    for row in SOURCES:
        if row.made_by in made:
            cells = (protection_of(row.able).value, row.able.stable_ids.value)
            lines.append(f"| {row.name} (`{row.made_by}`) | {' | '.join(cells)} |\n")
    return "".join([*lines, _crashes(made)])


def _crashes(made: frozenset[str]) -> str:
    """One row for each way: the sources that are made safe in one way behave alike."""
    found: dict[Protection, dict[str, set[str]]] = {}
    for row, guarantee, refused, outcomes in matrix(made):
        cell = "refused" if refused else _unlike_once(outcomes)
        found.setdefault(protection_of(row.able), {}).setdefault(guarantee.value, set()).add(cell)
    if any(len(same) > 1 for cells in found.values() for same in cells.values()):
        raise ValueError("sources that are made safe in one way behave differently: give each its rows")
    rows = "".join(f"| {way} | {' | '.join(cell for (cell,) in cells.values())} |\n" for way, cells in found.items())
    places = "\n".join(f"{number}. {crash.value}" for number, crash in enumerate(Crash, 1))
    guarantees = [*next(iter(found.values()))]
    head = CRASHES.format(places=places, guarantees=" | ".join(guarantees), rule=" --- |" * len(guarantees))
    return head + rows


def _unlike_once(outcomes: Iterable[DeliverySemantics]) -> str:
    """At which moments a message is not applied once; `once` where there is none."""
    moments: dict[str, list[str]] = {}
    for number, outcome in enumerate(outcomes, 1):
        if outcome not in (DeliverySemantics.ONCE, DeliverySemantics.ABSENT):
            moments.setdefault(outcome.value, []).append(str(number))
    return "; ".join(f"{', '.join(numbers)}: {outcome}" for outcome, numbers in moments.items()) or "once"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
