"""`NatsSource`: the messages of a NATS JetStream stream, by a pull consumer.

| module | question that it answers |
| --- | --- |
| `source` | which messages are pulled, confirmed and accounted for; is it still the same stream, and does it lack some |
| `client` | what is asked of the server, from a thread that keeps what is in work alive; what do its errors mean |
"""

from stormproof.core.source.nats.source import NatsSource

__all__ = ["NatsSource"]
