"""A confirm that is repeated by recovery records the dead letters that it, or the one before it, made."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
from support.memory_run import World

from stormproof.core.base.failpoint import FailpointError, armed
from stormproof.trident.ledger import tables as t
from stormproof.trident.terms.transaction_states import EventKind


def poison(line: str) -> list[str]:
    if line == "poison":
        raise ValueError("never")
    return line.split()


def dead_in_ledger(world: World) -> list[str]:
    with world.ledger_engine.execution_options(schema_translate_map={t.SCHEMA: None}).connect() as connection:
        rows = connection.execute(t.event.select().where(t.event.c.kind == EventKind.DEAD_LETTER.value))
        return [row.message for row in rows]


@pytest.mark.parametrize("place", ["finish.in_transaction", "finish.before_commit", "abort.in_transaction"])
@pytest.mark.parametrize("payloads", [[b"a", b"poison"], [b"poison"]])
def test_a_dead_letter_is_recorded_once_wherever_its_driver_died(
    place: str, payloads: list[bytes], tmp_path: Path
) -> None:
    world = World(payloads, tmp_path, split=poison, max_attempts=1)
    with armed(f"{place}=error"), suppress(FailpointError):
        world.run()
    world.run()
    assert [letter.payload for letter in world.source.dead_letters()] == [b"poison"]
    assert len(dead_in_ledger(world)) == 1
