"""Sources of messages: opened, then confirmed or aborted. What every one keeps in a store is in `stormproof.core.pending`.

| module | question that it answers |
| --- | --- |
| `protocol` | what does a topology ask of a source: the contract, slices, leases |
| `kind` | does a replayed batch have the same messages: transactional, opaque, or neither |
| `postgres_queue` | how are messages put into a Postgres queue, numbered and read |
| `files` | how do Parquet, JSON lines, text files and micro-batches become messages |
| `nats` | how are the messages of a NATS JetStream stream pulled and confirmed |
| `redis_streams` | how are the entries of a Redis stream read, taken over and confirmed |
| `kafka` | how are Kafka's topics read: by ranges of offsets |
| `kestrel` | how are the items of Kestrel queues taken over |
| `rabbitmq` | how are a RabbitMQ queue's messages received and confirmed |
| `stable_ids` | where is the id that a message's publisher gave it |
| `iterator`, `memory` | a client of the user's own as a source; messages in memory |
| `iterator_client` | what does the user's iterator give, and what is it told |
| `capabilities` | what can a source's server do; how is a batch made safe with it; what does a crash lead to |
| `group`, `spouts` | several spouts as one source; how their messages, ids and seeds are told apart |
| `metadata` | how does what a broker says of a message become fields |
| `stored` | what is stored of a broker's message: its payload as it came, and all that the broker says of it |
| `decode` | how does a payload become tuples, and when does it not decode |
| `backoff` | how long does a failed message wait for its retry |
| `dead_letter` | what is recorded of a dead letter; when a message becomes one, `stormproof.core.pending` decides |
"""
