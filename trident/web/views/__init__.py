"""The page's views, one module each; each reads through `stormproof.trident.audit`, as the commands do.

| module | what is shown |
| --- | --- |
| `entrance` | begin and end a session |
| `topology` | every topology in a line; one of them: driver, pace, back-pressure, sources, sinks, its graph as SVG |
| `batch` | the list of batches with filters; one batch as a timeline, down to each sink's evidence |
| `message` | what became of a message; where a message, or a txid, is found |
| `failures` | dead letters and rejects by class of error; one of them, with its payload for those who may see it |
| `questions` | the questions, each with its filters; what was tried again, over time |
"""
