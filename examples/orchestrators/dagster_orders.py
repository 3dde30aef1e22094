"""The orders as an asset of Dagster: a materialisation applies what is in the queue, and ends.

    pip install dagster dagster-webserver
    dagster asset materialize --select orders -f examples/orchestrators/dagster_orders.py
    dagster dev -f examples/orchestrators/dagster_orders.py

A failed step is tried again by its retry policy, and a run that was killed by the next run: both go on from the ledger. Let
no two runs of the asset be in work at once: the second one takes over, and the first one fails (`Fenced`).
"""

import dagster as dg
from orders import topology


@dg.asset(retry_policy=dg.RetryPolicy(max_retries=3, delay=30), pool="orders", compute_kind="stormproof")
def orders() -> dg.MaterializeResult:
    """Every order in the queue, applied once to the Delta table and to the Postgres table."""
    done = topology().run(until_idle=True)
    return dg.MaterializeResult(
        metadata={"batches": done.batches, "messages": done.messages, "dead letters": done.dead_letters}
    )


defs = dg.Definitions(assets=[orders])
