"""`NatsSource`: the messages of a NATS JetStream stream, by a pull consumer.

| module | question that it answers |
| --- | --- |
| `source` | which messages are pulled and confirmed; is it still the same stream, and does it lack messages |
| `consumer` | what is asked of the server, from a thread that keeps what is in work alive; what do its errors mean |
| `sequences` | which of the stream's sequences are accounted for |
| `message_metadata` | what does a message say of itself besides its payload |
"""

from stormproof.core.source.nats.source import NatsSource

__all__ = ["NatsSource"]
