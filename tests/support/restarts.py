"""A topology with fourteen sinks whose Postgres restarts, at places of a run that a seed draws."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from stormproof.core.base.failpoint import FAILPOINTS
from stormproof.core.postgres.embedded import EmbeddedPostgres
from support.contents import counted, in_delta, in_postgres
from support.crashes import Driver, resume, stood_still
from support.fault_stand import (
    BATCH_MESSAGES,
    NAME,
    RUN,
    TIMEOUT_S,
    Place,
    armed_pauses,
    blamed,
    command,
    messages,
    place_in,
)
from support.verdicts import verified

APPENDED, COUNTED = 11, 2
"""Postgres tables of each kind; a Delta table makes fourteen."""

RESTARTS_MAX = 3
POINTS = [point.name for point in FAILPOINTS.values() if point.scope in ("every", "delta", "postgres")]

TOPOLOGY = f'''
from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology, count


def split(line: str) -> list[str]:
    return line.split()


def topology() -> Topology:
    t = Topology("{NAME}")
    words = t.stream("lines", PostgresQueue("lines", schema="line string")).flat_map(split, "line", schema="word string")
    words.into(DeltaSink("lake/words"), *(PostgresSink(f"rows_{{n}}") for n in range({APPENDED})))
    counts = words.group_by("word").persistent_aggregate(n=count())
    counts.into(*(PostgresSink(f"counts_{{n}}") for n in range({COUNTED})))
    return t
'''


def restarts(server: EmbeddedPostgres, folder: Path, seed: int, rounds: int) -> Iterator[str]:
    """Each round is one run, in which the server restarts or crashes up to three times.

    Raises:
        AssertionError: a run did not outlive it, blamed a message, or left a table that is not exact.
    """
    rng = random.Random(seed)
    for number in range(1, rounds + 1):
        points = rng.sample(POINTS, rng.randint(1, RESTARTS_MAX))
        crashes = [rng.random() < 0.5 for _ in points]
        at = [rng.randint(1, 2) for _ in points]
        place_folder = folder / f"restarts-{number}"
        place_folder.mkdir()
        with place_in(place_folder, server, f"restarts_{number}", TOPOLOGY) as place:
            dealt = _one(place, points, crashes, at)
        what = ", ".join(
            f"{'crash' if crash else 'restart'} at {p} ({k})" for p, crash, k in zip(points, crashes, at, strict=True)
        )
        yield f"round {number}/{rounds}: {what}; {dealt} came about, exact"


def _one(place: Place, points: list[str], crashes: list[bool], at: list[int]) -> int:
    dealt = 0

    def meanwhile(child: Driver) -> None:
        nonlocal dealt
        while stood_still(child, NAME, TIMEOUT_S):
            place.server.restart(immediate=crashes[dealt % len(crashes)])
            dealt += 1
            resume(child)

    done = command(place, RUN, {**armed_pauses(points, at), "STORMPROOF_OUTAGE_S": "60"}, (), meanwhile)
    assert done.status == 0, done.err
    assert blamed(place) == 0, done.err
    should = Counter(word for payload in messages("m") for word in payload.decode().split())
    assert len(messages("m")) > 2 * BATCH_MESSAGES
    assert counted(in_delta(place.lake / "words", None)) == should
    for number in range(APPENDED):
        assert counted(in_postgres(place.database, f"rows_{number}", "1")) == should, number
    for number in range(COUNTED):
        assert counted(in_postgres(place.database, f"counts_{number}", "n"), once="counts") == should, number
    report = verified(NAME, place.database)
    assert not report.violations, report.violations
    assert not report.unknowns, report.unknowns
    return dealt
