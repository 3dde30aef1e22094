"""The topology that an orchestrator runs: orders from a queue into a Delta table and a Postgres table, each exactly once.

    stormproof queue put orders --lines orders.jsonl
    stormproof run examples/orchestrators/orders.py:topology --until-idle

`dagster_orders.py` and `airflow_orders.py` run it. Which messages are new, tried, or dead is in the ledger, not in the
orchestrator: one run more applies nothing twice, and a run that is killed is completed by the next one.
"""

from __future__ import annotations

import os

from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology


def euros(cents: int) -> float:
    """An amount below zero fails its message, which becomes a dead letter after some attempts."""
    if cents < 0:
        raise ValueError("an amount below zero")
    return cents / 100


def topology() -> Topology:
    """The Delta table is in the folder that LAKE names."""
    t = Topology("orders")
    source = PostgresQueue("orders", schema="number long, cents long", max_attempts=2)
    orders = t.stream("orders", source).each(euros, "cents", schema="euros double")
    orders.into(DeltaSink(f"{os.environ.get('LAKE', 'lake')}/orders"), PostgresSink("orders"))
    return t
