r"""Items of a Kestrel queue into Postgres, each exactly once from the moment when it is taken over.

Kestrel itself is no longer to be had by a package manager. A server that speaks its protocol is beside this example:

(cd examples && python -m kestrel_server.server --port 22133 --dir /tmp/kestrel)
printf 'set orders 0 0 28\r\n{"id": 1, "customer": "ann"}\r\n' | nc -q1 127.0.0.1 22133
stormproof run examples/brokers/kestrel.py:topology --until-idle

Without a running server this starts one, puts in some items, runs the topology and shows what is in the table:

python examples/brokers/kestrel.py
"""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import psycopg

from stormproof import KestrelSource, PostgresSink, Settings, Topology, count

EXAMPLES = Path(__file__).parents[1]


def topology(hosts: str = "127.0.0.1:22133", queue: str = "orders") -> Topology:
    """Count the orders of each customer, in the Postgres table `kestrel_orders`; `hosts` are separated by commas.

    The items have ids of their own, so an item that comes again is known, whenever it does. Leave `id_from` away where
    they have none.
    """
    t = Topology("kestrel-orders")
    source = KestrelSource(
        queue, hosts=hosts.split(","), schema="id bigint not null, customer string not null", id_from="field:id"
    )
    orders = t.stream("orders", source)
    orders.group_by("customer").persistent_aggregate(n=count()).into(PostgresSink("kestrel_orders"))
    return t


def put(port: int, queue: str, items: list[bytes]) -> None:
    """Put items into a queue, as any memcache client does."""
    with socket.create_connection(("127.0.0.1", port)) as connection, connection.makefile("rb") as answers:
        for item in items:
            connection.sendall(b"set %s 0 0 %d\r\n%s\r\n" % (queue.encode(), len(item), item))
            answer = answers.readline()
            if answer != b"STORED\r\n":
                raise SystemExit(f"the server answered {answer!r}")


def main() -> None:
    """Start a server, put items in, run the topology."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "kestrel_server.server", "--port", "0", "--dir", folder]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=EXAMPLES) as server:
            try:
                port = int(server.stdout.readline()) if server.stdout else 0
                put(
                    port,
                    "orders",
                    [b'{"id": %d, "customer": "%s"}' % (n, b"ann bob".split()[n % 2]) for n in range(10)],
                )
                topology(f"127.0.0.1:{port}").run("exactly-once", engine="inline", until_idle=True)
            finally:
                server.terminate()
    with psycopg.connect(Settings().resolve_database().conninfo) as connection:
        for customer, n in connection.execute("select customer, n from kestrel_orders order by customer"):
            print(f"{customer}: {n}")


if __name__ == "__main__":
    main()
