"""Writes docs/source_matrix.md from what each source declares: `.venv/bin/python tools/source_matrix_doc.py`."""

from __future__ import annotations

from pathlib import Path

import stormproof
from stormproof.core.source.capabilities import SOURCES, Crash, matrix, protection_of

PATH = Path(__file__).resolve().parents[1] / "docs" / "source_matrix.md"
HEAD = """# What each source promises at each crash

Made by `tools/source_matrix_doc.py` from `core/source/capabilities.py`: do not edit. The same functions decide in a run.

## How a batch is made safe

A source declares what its server can do. How its batches are made safe follows from that.

- **ranges**: the ledger has which messages are in a batch, and they are read again from the server. Nothing is confirmed to it.
- **journal**: messages are written down in the run's Postgres, under their stable ids, before they are opened. The server is
  told after the commit; a message that comes again is known by its id, confirmed again and not applied again. This holds for
  the source's horizon after a message was resolved.
- **take-over**: as in the journal, but messages have no ids. The server is told as soon as they are written down. One that it
  delivers again between the two cannot be told from a new one: exactly-once begins when the server has been told.
- **none**: a message that comes again is applied again. Exactly-once is refused by name.

Under at-most-once, messages without ids are confirmed to their server before they are written down.

"""
ABILITIES = (
    "| source | stable ids | re-opens an exact set | confirm is fenced | counts attempts | made safe by | note |\n"
)


def text() -> str:
    """The page, with the sources that there are."""
    made = frozenset(stormproof.__all__)
    lines = [HEAD, ABILITIES, "| --- | --- | --- | --- | --- | --- | --- |\n"]
    for row in SOURCES:
        if row.made_by in made:
            able = row.able
            fenced = _yes(able.fenced_confirm) if able.delivers else "nothing to confirm"
            cells = (able.stable_ids.value, _yes(able.reopens), fenced, _yes(able.counts_attempts))
            safe = protection_of(able).value
            lines.append(f"| {row.name} (`{row.made_by}`) | {' | '.join(cells)} | {safe} | {row.note} |\n")
    lines.append(_crashes(made))
    return "".join(lines)


def _crashes(made: frozenset[str]) -> str:
    columns = "\n".join(f"{number}. {crash.value}" for number, crash in enumerate(Crash, 1))
    numbers = " | ".join(str(number) for number, _ in enumerate(Crash, 1))
    lines = [
        "\n## How often a message is applied\n\n"
        "The driver ends, or what is named goes, when the message is:\n\n"
        f"{columns}\n\n"
        "The worst that may happen; `-`: there is no such moment. It counts rows in a sink that takes part in the guarantee.\n"
        'Sources that are made safe in one way behave alike; "journal" needs the server to keep its own promise to deliver\n'
        "again what was not confirmed.\n\n"
        f"| source | guarantee | {numbers} |\n| --- | --- |{' --- |' * len(Crash)}\n"
    ]
    for row, guarantee, refused, outcomes in matrix(made):
        cells = ["refused", *[""] * (len(Crash) - 1)] if refused else [outcome.value for outcome in outcomes]
        lines.append(f"| {row.name} | {guarantee.value} | {' | '.join(cells)} |\n")
    return "".join(lines)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
