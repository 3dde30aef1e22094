"""The page's views, one module each; each reads through `stormproof.trident.audit`, as the commands do.

| module | what is shown |
| --- | --- |
| `topology` | every topology in a line; one of them: driver, pace, back-pressure, sources, sinks, its graph as SVG |
| `batch` | the list of batches with filters; one batch as a timeline; what became of a message; where one is found |
| `decisions` | a decision: what it would do, its confirmation, what it did; canaries |
| `failures` | dead letters and rejects by class of error; one of them, with its payload for those who may see it |
| `questions` | the questions, each with its filters; what was tried again, over time |
"""
