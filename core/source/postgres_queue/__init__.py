"""A durable queue in Postgres, read as a pending source by any number of subscriptions."""

from stormproof.core.source.postgres_queue.produce import Receipt
from stormproof.core.source.postgres_queue.queue import Peeked, PostgresQueue, QueueStats
from stormproof.core.source.postgres_queue.reader import PostgresSliceReader

__all__ = ["Peeked", "PostgresQueue", "PostgresSliceReader", "QueueStats", "Receipt"]
