"""`RabbitMQSource` and `RabbitMQStreamSource`: the messages of a RabbitMQ queue, and those of a stream.

| module | question that it answers |
| --- | --- |
| `source` | of a queue: what is a message's id; what is received and confirmed |
| `consumer` | what is asked of the broker over one connection that consumes a queue |
| `stream_source` | of a stream: which offsets are a slice, and what becomes of offsets that are gone |
| `stream_lookahead` | which offsets have a message behind a position; is it still the same stream |
| `stream_reader` | the messages of a slice, in an executor |
| `stream_feed` | what is asked of the broker over one connection that reads a stream |
| `stream_position` | how position and slices are written down; what does the audit make of them |
| `management` | what may a queue's own limits do to messages that are pending |
| `message_metadata` | what RabbitMQ knows of a message beside its payload |
| `broker` | how a queue is reached; what do the broker's errors mean |
"""

from stormproof.core.source.rabbitmq.source import RabbitMQSource
from stormproof.core.source.rabbitmq.stream_source import RabbitMQStreamSource

__all__ = ["RabbitMQSource", "RabbitMQStreamSource"]
