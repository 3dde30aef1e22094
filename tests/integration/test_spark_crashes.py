"""The chain on Spark: at one failpoint of each kind of place a driver is killed, failed, or taken over from.

The driver that takes over, and the last one, have the inline engine: they meet what drivers on Spark left behind.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from support.blows import Action, Blow
from support.chain import Chain, Ordeal
from support.crashes import Cell, Driver, start
from support.rounds import stand_on
from support.spark_driver import TIMEOUT_S, SparkDriver

from stormproof.core.base.failpoint import ENV
from stormproof.core.postgres.embedded import EmbeddedPostgres

STARTS = (  # each but the first recovers, on Spark, from the one before
    (Blow("task.after_file", Action.KILL),),  # inside a Spark task
    # A sink that holds it without an answer; after that, inside a sink's transaction.
    (Blow("delta.after_log_entry", Action.RAISE), Blow("postgres.after_rows", Action.KILL, 3)),
    (Blow("prepare.after", Action.TAKE_OVER),),  # frozen and untouched
)


def on_spark_where_armed(cell: Cell, environment: Mapping[str, str]) -> Driver:
    return (SparkDriver if environment[ENV] else start)(cell, environment)


@pytest.mark.spark(own=True)
@pytest.mark.postgres
@pytest.mark.sampled(0.3, pool="long")
@pytest.mark.timeout(600)
def test_a_driver_on_spark_killed_in_every_kind_of_place(postgres: EmbeddedPostgres) -> None:
    with stand_on(postgres, "spark_chain", proxied=False) as stand:
        stand.cell = replace(stand.cell, in_flight=4, batch_messages=3)
        stand.start, stand.timeout_s = on_spark_where_armed, TIMEOUT_S
        print(Chain(stand).undergo(Ordeal("on Spark", STARTS)), dict(stand.tally))
        assert set(stand.reached) == {blow.point for blows in STARTS for blow in blows}
