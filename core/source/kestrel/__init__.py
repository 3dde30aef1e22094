"""`KestrelSource`: the items of a Kestrel queue as messages, over several servers.

| module | question that it answers |
| --- | --- |
| `source` | what is received and confirmed; what is an item's id |
| `client` | which server is asked next; what is sent, and what does an answer mean |
"""

from stormproof.core.source.kestrel.source import KestrelSource

__all__ = ["KestrelSource"]
