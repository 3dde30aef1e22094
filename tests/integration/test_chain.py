"""One topology with all four sinks, and one with states, lives through a misfortune at every failpoint, and several at once.

Real Postgres, real Delta tables, the inline engine. `make torture` is the long form: every failpoint in every way, and
hundreds of random rounds.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from support import random_code
from support.blows import Action
from support.chain import Chain, one_way_each, ordeal, ordeals, shuffled
from support.races import races
from support.rounds import ROUNDS_PER_TOPOLOGY, SHAPES, Rounds, lives, stand_on
from support.states import IN_MAPS, READ, promised
from support.strict_tables import STRICT_TABLES

from stormproof.core.base.failpoint import FAILPOINTS
from stormproof.core.postgres.embedded import EmbeddedPostgres

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]

ORDEALS_PER_END = 4
"""`make torture` has a start that runs to the end after each."""
ROUNDS = 8
STATE_CELLS = 3
TABLE_CELLS = 3
RANDOM_CODE_CELLS = 6
RACES = 6
WAYS = [Action.KILL, Action.RAISE, Action.LAPSE, Action.TAKE_OVER]

RANDOM_CODE = (
    "task.after_file",
    "run.after",
    "prepare.in_transaction",
    "prepare.after",
    "delta.after_log_entry",
    "postgres.after_rows",
    "commit.after_sink",
)


@pytest.mark.sampled(0.3, pool="long")
@pytest.mark.parametrize("in_flight", [1, 4])
def test_a_misfortune_at_every_failpoint(postgres: EmbeddedPostgres, in_flight: int, seed: int) -> None:
    """Half of them, by the seed, with one batch in flight: killed there. The other half with four: killed, failed, left
    standing or taken over from, in turn."""
    cells = ordeals([Action.KILL]) if in_flight == 1 else one_way_each(WAYS, seed)
    cells = shuffled(cells, random.Random(seed))[0 if in_flight == 1 else 1 :: 2]  # the same order for both
    tally: Counter[str] = Counter()
    batch = 5 if in_flight == 1 else 3
    shaped = partial(replace, in_flight=in_flight, batch_messages=batch)
    for line in lives(postgres, cells, tally, shaped, ordeals_per_end=ORDEALS_PER_END):
        print(line)
    print(tally)


@pytest.mark.sampled(0.3, pool="long")
def test_a_misfortune_at_every_place_of_a_states_commit(postgres: EmbeddedPostgres, seed: int) -> None:
    """Maps in Postgres and Delta, four batches in flight: killed, failed, left standing or taken over from, in turn."""
    points = [point for point in FAILPOINTS.values() if point.scope == "state"]
    cells = shuffled(one_way_each(WAYS, seed, points, IN_MAPS), random.Random(seed))
    tally: Counter[str] = Counter()
    shaped = partial(replace, in_flight=4, batch_messages=3)
    for line in lives(postgres, cells, tally, shaped, IN_MAPS, ordeals_per_end=ORDEALS_PER_END):
        print(line)
    print(tally)


def test_states_that_are_read_while_batches_run_outlive_a_misfortune(postgres: EmbeddedPostgres, seed: int) -> None:
    """Maps over a key-value store among them."""
    cells = random.Random(seed).sample([o for o in ordeals(WAYS, shape=READ) if promised(o)], STATE_CELLS)
    for line in lives(postgres, cells, Counter(), lambda cell: cell, READ):
        print(line)


def test_upserts_and_rejects_outlive_a_misfortune(postgres: EmbeddedPostgres, seed: int) -> None:
    """Appends and upserts in Delta and Postgres; tables in Postgres refuse some rows. Two batches in flight."""
    cells = random.Random(seed).sample(ordeals(WAYS, shape=STRICT_TABLES), TABLE_CELLS)
    cells.append(ordeal(FAILPOINTS["postgres.after_rejects"], Action.KILL))
    shaped = partial(replace, in_flight=2, batch_messages=4)
    for line in lives(postgres, cells, Counter(), shaped, STRICT_TABLES, ordeals_per_end=ORDEALS_PER_END):
        print(line)


def test_a_lost_commit_of_a_state_is_applied_once(postgres: EmbeddedPostgres) -> None:
    """Its answer is lost, or it never reaches the server."""
    with stand_on(postgres, "lost_state") as stand:
        assert stand.proxy is not None
        made = Chain(stand, IN_MAPS)
        for at, action in enumerate((Action.LOSE_ANSWER, Action.LOSE_COMMIT), start=1):
            print(made.undergo(ordeal(FAILPOINTS["state.after_rows"], action, at)))
            assert stand.proxy.lost == at


def test_a_first_driver_that_dies_before_it_reads_leaves_nothing_that_the_audit_cannot_tell(
    postgres: EmbeddedPostgres,
) -> None:
    with stand_on(postgres, "first", proxied=False) as stand:
        print(Chain(stand).undergo(ordeal(FAILPOINTS["start.after_epoch"], Action.KILL)))


def test_random_rounds_of_several_misfortunes_at_once(server: EmbeddedPostgres, seed: int) -> None:
    """Into sinks or into states, as the seed decides."""
    rounds = Rounds(server, seed)
    first = 1 + ROUNDS_PER_TOPOLOGY * (seed % len(SHAPES))
    for number, line in rounds.run(first, first + ROUNDS - 1):
        print(number, line)
    print(rounds.tally)


def test_two_drivers_started_at_once(postgres: EmbeddedPostgres, seed: int) -> None:
    for line in races(postgres, RACES, seed):
        print(line)


def test_code_that_gives_something_else_at_each_run_is_in_all_sinks_from_one_run(
    postgres: EmbeddedPostgres, seed: int
) -> None:
    with stand_on(postgres, "random_code", proxied=False) as stand:
        stand.cell = replace(stand.cell, in_flight=4, batch_messages=2)
        cells = ordeals([Action.KILL, Action.TAKE_OVER], [FAILPOINTS[name] for name in RANDOM_CODE])
        cells = random.Random(seed).sample(cells, RANDOM_CODE_CELLS)
        for line in Chain(stand, random_code.SHAPE, ORDEALS_PER_END).run(cells):
            print(line)
        random_code.require_one_call(stand.cell, stand.database, stand.put)
