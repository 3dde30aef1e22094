"""A covering subset of the crash matrix on Spark: the chain over one failpoint of each kind of place."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.blows import Action
from support.chain import Chain, ordeals
from support.rounds import stand_on
from support.spark_driver import TIMEOUT_S, SparkDriver

from stormproof.core.failpoint import FAILPOINTS
from stormproof.core.postgres.embedded import EmbeddedPostgres

COVERING = (
    ("task.after_file", Action.KILL),  # inside a Spark task
    ("prepare.after", Action.TAKE_OVER),  # frozen and untouched
    ("delta.after_log_entry", Action.RAISE),  # a sink that holds it without an answer
    ("postgres.after_rows", Action.KILL),  # inside a sink's transaction
)


@pytest.mark.spark
@pytest.mark.postgres
@pytest.mark.timeout(600)
def test_a_driver_on_spark_killed_in_every_kind_of_place(postgres: EmbeddedPostgres) -> None:
    with stand_on(postgres, "spark_chain", proxied=False) as stand:
        stand.cell = replace(stand.cell, in_flight=4, batch_messages=2)
        stand.start, stand.timeout_s = SparkDriver, TIMEOUT_S
        for point, action in COVERING:
            for line in Chain(stand).run(ordeals([action], [FAILPOINTS[point]])[:1]):
                print(line)
