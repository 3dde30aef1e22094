"""The page's views, one module each; each reads through `stormproof.trident.audit`, as the commands do.

| module | what is shown |
| --- | --- |
| `entrance` | begin and end a session |
| `overview` | every topology in a line: what runs, what waits, what is wrong |
"""
