"""`RabbitMQSource`: the messages of a RabbitMQ queue, classic or quorum.

| module | question that it answers |
| --- | --- |
| `source` | what is a message's id; what is received and confirmed |
| `consumer` | what is asked of the broker over one connection; what do its errors mean |
"""

from stormproof.core.source.rabbitmq.source import RabbitMQSource

__all__ = ["RabbitMQSource"]
