"""Two drivers of one topology at the same instant: one wins, the other stops as fenced, or comes when all is done."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from stormproof.core.base.failpoint import ENV
from stormproof.core.postgres.embedded import EmbeddedPostgres
from support.blows import Stand
from support.crashes import FENCED, ended, resume, start, stood_still
from support.rounds import stand_on
from support.topologies import expected, messages
from support.verdicts import require_exact

MESSAGES: Final = 9

PLACES: Final = ("", "start.before_epoch", "start.after_epoch", "recover.before", "open.before", "commit.before_sink")
"""Where both are held until both are there, so that they go on at one instant; the empty one: nowhere."""


def race(stand: Stand, place: str, number: int) -> tuple[int, ...]:
    """Start two at once; how they ended.

    Raises:
        AssertionError: not exactly one way of ending well, or a sink is not exact.
    """
    stand.give(messages(MESSAGES, prefix=f"r{number}w"))
    two = [start(stand.cell, {ENV: f"{place}=pause" if place else ""}) for _ in range(2)]
    try:
        if place:
            for one in two:
                stood_still(one, place)
            for one in two:
                if one.exitcode is None:
                    resume(one)
        codes = tuple(sorted(ended(one, f"race {number}") for one in two))
    finally:
        for one in two:
            one.kill()
            one.join()
    assert codes in ((0, FENCED), (0, 0)), f"race {number} from {place or 'the start'}: they ended with {codes}"
    require_exact(replace(stand.cell, database=stand.database), expected(stand.put))
    return codes


def races(server: EmbeddedPostgres, number: int, seed: int) -> Iterator[str]:
    """So many races, with 1 and with 4 batches in flight; a line each, and one for all."""
    rng = random.Random(seed)
    came: Counter[str] = Counter()
    with stand_on(server, "races", proxied=False) as stand:
        for n in range(1, number + 1):
            in_flight, place = rng.choice([1, 4]), PLACES[n % len(PLACES)]
            stand.cell = replace(stand.cell, in_flight=in_flight, batch_messages=2)
            codes = race(stand, place, n)
            came["one fenced" if FENCED in codes else "one came when the other was done"] += 1
            yield f"race {n}/{number}: from {place or 'the start'}, {in_flight} in flight: ended with {codes}, exact"
    yield f"{number} races exact; {', '.join(f'{what}: {n}' for what, n in came.items())}"
