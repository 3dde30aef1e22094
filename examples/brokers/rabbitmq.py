"""Messages of a RabbitMQ queue into Postgres, each exactly once, by the id that its publisher gave it.

apt-get install rabbitmq-server
pip install 'stormproof[rabbitmq]'

With a broker at the url this declares a queue, publishes some messages, one of them twice, runs the topology and shows what
is in the table:

python examples/brokers/rabbitmq.py --url amqp://guest:guest@127.0.0.1:5672/%2F

The topology alone, over a queue that is there:

stormproof run examples/brokers/rabbitmq.py:topology --param queue=orders --until-idle
"""

from __future__ import annotations

import argparse

import psycopg

from stormproof import PostgresSink, RabbitMQSource, Settings, Topology, count

URL = "amqp://guest:guest@127.0.0.1:5672/%2F"


def topology(url: str = URL, queue: str = "orders") -> Topology:
    """Count the orders of each customer, in the Postgres table `rabbitmq_orders`."""
    t = Topology("rabbitmq-orders")
    source = RabbitMQSource(queue, url=url, schema="id bigint not null, customer string not null", id_from="message_id")
    orders = t.stream("orders", source)
    orders.group_by("customer").persistent_aggregate(n=count()).into(PostgresSink("rabbitmq_orders"))
    return t


def publish(url: str, queue: str, numbers: list[int]) -> None:
    """Publish orders as persistent messages, and wait until the broker has them."""
    import pika
    import pika.exceptions

    try:
        connection = pika.BlockingConnection(pika.URLParameters(url))
    except pika.exceptions.AMQPConnectionError:
        raise SystemExit(
            "no RabbitMQ broker answers there; install and start one: apt-get install rabbitmq-server"
        ) from None
    channel = connection.channel()
    channel.confirm_delivery()
    channel.queue_declare(queue, durable=True)
    for n in numbers:
        body = b'{"id": %d, "customer": "%s"}' % (n, b"ann bob".split()[n % 2])
        channel.basic_publish(
            "", queue, body, pika.BasicProperties(delivery_mode=2, message_id=f"order-{n}"), mandatory=True
        )
    connection.close()


def main() -> None:
    """Publish, run the topology, show the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default=URL)
    url = parser.parse_args().url
    publish(url, "orders", [0, 1, 2, 3, 4, 5, 5, 6, 7])
    topology(url).run("exactly-once", engine="inline", until_idle=True)
    with psycopg.connect(Settings().resolve_database().conninfo) as connection:
        for customer, n in connection.execute("select customer, n from rabbitmq_orders order by customer"):
            print(f"{customer}: {n}")


if __name__ == "__main__":
    main()
