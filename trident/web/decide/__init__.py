"""Decisions on the page: each is looked at first, confirmed with who and why, acted on once, and then shown.

| module | what is in it |
| --- | --- |
| `action` | what a decision is: fields, a look at what it is about now, what it does |
| `catalogue` | all of them, by name |
| `letters`, `choosing` | of messages: one, those selected, all that match; by a canary |
| `driver`, `batches`, `starts` | of a driver, a batch that cannot go on, a refused start |
| `tables` | of a sink's table, and of the ledger's size |
| `proposals` | what was shown before a confirmation; each is acted on at most once |
| `canary_runs` | canaries that run behind the page |
| `pages` | the addresses |
"""
