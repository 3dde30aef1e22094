"""Each example runs as its own text says, and prints what it should."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.brokers import Broker, skip_where_missing
from support.brokers.nats_server import NatsServer
from support.brokers.redis_server import RedisServer
from support.queues import prepared_database

from stormproof.core.postgres.database import Database

EXAMPLES = Path(__file__).parents[2] / "examples"
INLINE_TIMEOUT_S = 60
SPARK_TIMEOUT_S = 240
DONE = {
    "basic_bolts_word_count": [
        "5 sentences in 2 batches, 1 dead letter",
        "failures by reason: {'failed': 2}",
        "  4 the",
        "  2 and",
        "  2 seven",
        "  1 a",
    ],
    "bolts_word_count": [
        "rehearsal with 2 drivers: 5 sentences acked, 1 dead, 4 times 'the'",
        "5 sentences in 2 batches, 1 dead letter",
        "  4 the",
        "  2 and",
        "  2 seven",
        "  1 a",
    ],
    "join_orders_and_payments": [
        "5 messages in 2 batches, 1 dead letter",
        "paid:   1 lamp 29.00",
        "paid:   2 desk 199.00",
        "unpaid: 3 chair",
    ],
    "message_unit": [
        "3 baskets in 2 batches, 1 dead letter",
        "{'basket': 1, 'item': 'milk', 'pieces': 1}",
        "{'basket': 1, 'item': 'tea', 'pieces': 2}",
        "{'basket': 2, 'item': 'bread', 'pieces': 1}",
    ],
    "metrics_sampling": [
        "at-most-once: 1000 messages, 1 failed and gone, 0 replayed",
        "host-0: 34 sampled, 20.0 ms busy on average",
        "host-1: 33 sampled, 20.3 ms busy on average",
        "host-2: 33 sampled, 19.7 ms busy on average",
    ],
}

pytestmark = pytest.mark.postgres


def run(name: str, database: Database, folder: Path, *arguments: str, timeout_s: int) -> list[str]:
    url = database.sqlalchemy_url.render_as_string(hide_password=False)
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments],
        env={**os.environ, "STORMPROOF_DATABASE_URL": url, "STORMPROOF_MASTER": "local[2,4]"},
        cwd=folder,
        check=False,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", sorted(DONE))
def test_an_example_does_what_its_text_says(name: str, database: Database, tmp_path: Path) -> None:
    assert run(name, prepared_database(database), tmp_path, "--inline", timeout_s=INLINE_TIMEOUT_S) == DONE[name]


@pytest.mark.parametrize("broker", [RedisServer, NatsServer], ids=["redis_streams", "nats_jetstream"])
def test_an_example_of_a_broker_starts_its_server_and_applies_each_order_once(
    request: pytest.FixtureRequest, broker: type[Broker], database: Database, tmp_path: Path
) -> None:
    skip_where_missing(broker)
    name = f"brokers/{request.node.callspec.id}"
    assert run(name, prepared_database(database), tmp_path, timeout_s=INLINE_TIMEOUT_S) == [
        "2 messages, 1 dead letters",
        "1 messages, 0 dead letters",
        "{'number': 1, 'customer': 'Ada'}",
        "{'number': 2, 'customer': 'Cy'}",
        "{'number': 3, 'customer': 'Ada'}",
    ]


@pytest.mark.spark(own=True)
@pytest.mark.timeout(SPARK_TIMEOUT_S)
def test_the_word_count_by_bolts_does_the_same_on_spark(database: Database, tmp_path: Path) -> None:
    assert (
        run("bolts_word_count", prepared_database(database), tmp_path, timeout_s=SPARK_TIMEOUT_S)
        == DONE["bolts_word_count"]
    )


@pytest.mark.spark(own=True)
@pytest.mark.timeout(SPARK_TIMEOUT_S)
def test_streaming_queries_write_through_foreach_batch(database: Database, tmp_path: Path) -> None:
    made = run("foreach_batch", prepared_database(database), tmp_path, timeout_s=SPARK_TIMEOUT_S)
    assert made == [
        "batch 0: committed, 2 rows, txid 1",
        "batch 1: committed, 2 rows, txid 2",
        "3 orders, 1 dead letter",
        "{'number': 1, 'customer': 'Ada', 'cents': 500}",
        "{'number': 2, 'customer': 'Bob', 'cents': 300}",
        "{'number': 3, 'customer': 'Ada', 'cents': -1}",
        "{'number': 4, 'customer': 'Bob', 'cents': 200}",
        "{'customer': 'Ada', 'cents': 500}",
        "{'customer': 'Bob', 'cents': 500}",
    ]


@pytest.mark.spark(own=True)
@pytest.mark.timeout(2 * SPARK_TIMEOUT_S)
def test_a_daily_job_writes_each_day_once(database: Database, tmp_path: Path) -> None:
    prepared = prepared_database(database)
    told = run("daily_job", prepared, tmp_path, "--dry-run", "2026-11-22", timeout_s=SPARK_TIMEOUT_S)
    assert told[0] == "dry run of daily-revenue, key '2026-11-22': would commit, txid 1, 2 rows"
    assert told[1].endswith("append: would create the table")
    assert told[2] == "    columns: day string, customer string, cents long"
    assert not (tmp_path / "lake").exists()
    days = ("2026-11-22", "2026-11-23", "2026-11-22")
    assert run("daily_job", prepared, tmp_path, *days, timeout_s=SPARK_TIMEOUT_S) == [
        "2026-11-22: committed, 2 rows, txid 1",
        "2026-11-23: committed, 2 rows, txid 2",
        "2026-11-22: suppressed, 0 rows, txid 1",
    ]
