"""How a payload becomes tuples, and how what a server sent is kept until then.

| module | question that it answers |
| --- | --- |
| `decoders` | how does a payload become tuples, and when does it not decode |
| `stored` | what is stored of a broker's message: its payload as it came, and all that the broker says of it |
"""
