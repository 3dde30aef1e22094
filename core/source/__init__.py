"""Sources of messages: opened, then confirmed or aborted. What all have in common is in `contract` and `pending`.

| module | question that it answers |
| --- | --- |
| `postgres_queue` | how are messages put into a Postgres queue, numbered and read |
| `files` | how do Parquet, JSON lines, text files and micro-batches become messages |
| `nats` | how are the messages of a NATS JetStream stream pulled and confirmed |
| `redis_streams` | how are the entries of a Redis stream read, taken over and confirmed |
| `kafka` | how are Kafka's topics read: by ranges of offsets |
| `kestrel` | how are the items of Kestrel queues taken over |
| `rabbitmq` | how are a RabbitMQ queue's messages received and confirmed; how is a stream read by offsets |
| `memory`, `iterator` | messages in memory; a client of the user's own as a source |
| `group`, `spouts` | several spouts as one source; how their messages, ids and seeds are told apart |
| `metadata` | how does what a broker says of a message become fields |
| `stable_ids` | where is the id that its publisher gave it |
"""
