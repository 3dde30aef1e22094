"""A durable queue in Postgres, read as a pending source by any number of subscriptions.

| module | question that it answers |
| --- | --- |
| `queue` | `PostgresQueue`: how is a queue declared, put to, peeked into and read; is it on its own server |
| `message_table`, `tables` | how are messages put; which tables hold them; whose transaction numbers do they carry |
| `position` | which messages lie between two snapshots |
| `reader` | where does a limit cut them; what must a job find; how does an executor read its part, by COPY into Arrow |
| `audit` | are there gaps between slices, for the audit |
"""

from stormproof.core.source.postgres_queue.message_table import Receipt
from stormproof.core.source.postgres_queue.queue import Peeked, PostgresQueue, QueueStats
from stormproof.core.source.postgres_queue.reader import PostgresSliceReader

__all__ = ["Peeked", "PostgresQueue", "PostgresSliceReader", "QueueStats", "Receipt"]
