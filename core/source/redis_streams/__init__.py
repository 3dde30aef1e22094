"""`RedisStreamSource`: the entries of a Redis stream as messages, by a consumer group.

| module | question that it answers |
| --- | --- |
| `source` | which entries are read, taken over, confirmed; how do fields become a payload; is it still the same stream |
| `client` | what is asked of the server; what do its errors mean; how many of the entries are accounted for |
"""

from stormproof.core.source.redis_streams.source import RedisStreamSource

__all__ = ["RedisStreamSource"]
