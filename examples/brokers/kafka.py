"""Orders from a Kafka topic, each exactly once in a Delta table: what an aborted transaction wrote never shows.

    pip install 'stormproof[kafka]'
    python examples/brokers/kafka.py --servers localhost:9092    # a broker of yours; makes the topic `orders`
    python examples/brokers/kafka.py --jars .brokers/kafka       # starts one, from the jars that `make setup` copies

Add --inline to do without Spark. Kill it at any time and start it again: it goes on where it was.
"""

from __future__ import annotations

import argparse
import base64
import json
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from deltalake import DeltaTable

from stormproof import DeltaSink, FailTuple, KafkaSource, Topology

try:
    from confluent_kafka import KafkaException, Producer
    from confluent_kafka import admin as kafka_admin
except ImportError:
    sys.exit("the client is not installed: pip install 'stormproof[kafka]'")

TOPIC = "orders"
SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
advertised.listeners=PLAINTEXT://127.0.0.1:{port}
controller.listener.names=CONTROLLER
log.dirs={data}
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
"""


def topology(servers: str, lake: str) -> Topology:
    """Orders with the offset and the key of their messages; an order without a price fails."""

    def checked(number: int, cents: int, offset: int, key: bytes) -> list[tuple[int, int, int, str]]:
        if cents <= 0:
            raise FailTuple(f"order {number} costs {cents} cents")
        return [(number, cents, offset, key.decode())]

    t = Topology("orders")
    source = KafkaSource(
        TOPIC,
        servers=servers,
        schema="number long, cents long",
        metadata=("offset", "key"),
        max_attempts=2,
    )
    orders = t.stream("orders", source)
    orders.flat_map(
        checked, "number", "cents", "offset", "key", schema="number long, cents long, offset long, customer string"
    ).into(DeltaSink(f"{lake}/orders"))
    return t


def produce(servers: str) -> None:
    """Three orders in a transaction, one that is no order, and one in a transaction that is aborted."""
    admin: Any = kafka_admin.AdminClient({"bootstrap.servers": servers})
    new: Any = vars(kafka_admin)["NewTopic"]
    try:
        admin.create_topics([new(TOPIC, 1)])[TOPIC].result()
    except KafkaException as error:
        if error.args[0].name() != "TOPIC_ALREADY_EXISTS":
            raise
    producer = Producer({"bootstrap.servers": servers, "transactional.id": "orders-example"})
    producer.init_transactions()
    for orders, commit in (([(1, 500), (2, 300), (3, 0)], True), ([(4, 100)], False), ([(5, 250)], True)):
        producer.begin_transaction()
        for number, cents in orders:
            producer.produce(TOPIC, json.dumps({"number": number, "cents": cents}), key=f"customer-{number}")
        producer.flush()
        (producer.commit_transaction if commit else producer.abort_transaction)()


@contextmanager
def broker(jars: str) -> Generator[str]:
    """A broker for as long as the block lasts; its address."""
    if shutil.which("java") is None or not list(Path(jars).glob("kafka_2.13-*.jar")):
        sys.exit(f"no broker in {jars}: apt-get install maven openjdk-17-jre-headless, then make setup")
    with tempfile.TemporaryDirectory() as folder:
        port, controller = free_port(), free_port()
        settings = Path(folder, "server.properties")
        settings.write_text(SETTINGS.format(port=port, controller=controller, data=f"{folder}/data"))
        java = ["java", "-Xmx512m", "-cp", f"{jars}/*"]
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        format_ = [*java, "kafka.tools.StorageTool", "format", "-t", cluster, "-c", str(settings)]
        subprocess.run(format_, check=True, **quiet)  # type: ignore[call-overload]
        process = subprocess.Popen([*java, "kafka.Kafka", str(settings)], **quiet)  # type: ignore[call-overload]
        try:
            wait_for(port)
            yield f"127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def free_port() -> int:
    """A port of this machine that nobody listens on, below those that the system gives to clients."""
    while True:
        port = random.randrange(20_000, 32_000)  # noqa: S311 - no secret
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def wait_for(port: int) -> None:
    """Until a broker answers there."""
    admin = kafka_admin.AdminClient({"bootstrap.servers": f"127.0.0.1:{port}", "log_level": 0})
    end_s = time.monotonic() + 60
    while True:
        try:
            admin.list_topics(timeout=1)
        except KafkaException:
            if time.monotonic() > end_s:
                sys.exit("the broker does not answer")
        else:
            return


def main() -> None:
    """Produce, run until nothing is left, show the table."""
    arguments = argparse.ArgumentParser(description="Kafka to Delta, exactly once")
    arguments.add_argument("--servers", help="a broker that runs already")
    arguments.add_argument("--jars", default=".brokers/kafka", help="the folder with Kafka's jars, to start one")
    arguments.add_argument("--lake", default="lake")
    arguments.add_argument("--inline", action="store_true", help="in one process, without Spark")
    given = arguments.parse_args()
    if given.servers:
        run(given.servers, given.lake, inline=given.inline)
    else:
        with broker(given.jars) as servers:
            run(servers, given.lake, inline=given.inline)


def run(servers: str, lake: str, *, inline: bool) -> None:
    """From the topic into the table."""
    produce(servers)
    done = topology(servers, lake).run("exactly-once", engine="inline" if inline else "spark", until_idle=True)
    print(f"{done.messages} messages in {done.batches} batches, {done.dead_letters} dead letter")
    rows: list[dict[str, Any]] = DeltaTable(f"{lake}/orders").to_pyarrow_table().sort_by("number").to_pylist()
    for row in rows:
        print(row)


if __name__ == "__main__":
    main()
