"""`RedisStreamSource`: the entries of a Redis stream as messages, by a consumer group.

| module | question that it answers |
| --- | --- |
| `source` | which entries are read or taken over, and confirmed; is it still the same stream |
| `group` | what is asked of the server; what do its errors mean |
| `counted` | how many of the stream's entries are accounted for |
| `entries` | how do an entry's fields become a payload |
"""

from stormproof.core.source.redis_streams.source import RedisStreamSource

__all__ = ["RedisStreamSource"]
