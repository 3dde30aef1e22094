"""A plain batch job, exactly once for each day: what an orchestrator such as Airflow starts, and starts again.

    python examples/daily_job.py [--dry-run] 2026-11-22 ...

A day's orders are read from `orders/DAY.json`, and the revenue of each customer goes to a Delta table and to a Postgres
table. Run again with the same day it computes nothing; killed anywhere, the next run completes the day or writes it anew.
With `--dry-run` it says what it would do, and does nothing; the exit status is then 1 if the job would be refused.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from pyspark.sql import DataFrame, SparkSession

from stormproof import DeltaSink, PostgresSink, Settings, exactly_once, spark_session

ORDERS = [
    {"number": 1, "customer": "Ada", "cents": 500},
    {"number": 2, "customer": "Bob", "cents": 300},
    {"number": 3, "customer": "Ada", "cents": 250},
]


def revenue_of(spark: SparkSession, day: str) -> DataFrame:
    """A day's revenue by customer. It is computed from the day alone, not from the clock."""
    orders = spark.read.schema("number long, customer string, cents long").json(f"orders/{day}.json")
    return orders.groupBy("customer").sum("cents").selectExpr(f"'{day}' day", "customer", "`sum(cents)` cents")


def put_orders(day: str) -> None:
    """What another program puts there."""
    Path("orders").mkdir(exist_ok=True)
    Path("orders", f"{day}.json").write_text("\n".join(json.dumps(order) for order in ORDERS))


def main(*arguments: str) -> int:
    """Write each day, or say what that would do."""
    days = [text for text in arguments if not text.startswith("--")]
    spark, refused = spark_session(Settings()), False  # a session of your own will do, too
    with exactly_once(DeltaSink("lake/revenue"), PostgresSink("revenue"), name="daily-revenue") as write:
        for day in days:
            put_orders(day)
            revenue = revenue_of(spark, day)
            if "--dry-run" in arguments:
                told = write.dry_run(revenue, key=day)
                refused = refused or told.refused
                print(told)
            else:
                done = write.once(revenue, key=day)
                print(f"{day}: {done.outcome}, {done.rows} rows, txid {done.txid}")
    return 1 if refused else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
