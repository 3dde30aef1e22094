"""Decisions on the page: each is looked at first, confirmed with who and why, acted on once, and then shown.

Which there are, `trident/declarations/decisions.py` says.

| module | what is in it |
| --- | --- |
| `choosing` | what a decision is about, and what is filled in with its confirmation: forms as values |
| `letters` | of dead letters: one, those selected, all that match; by a canary |
| `proposals` | what was shown before a confirmation; each is acted on at most once |
| `canary_runs` | canaries that run behind the page |
| `pages` | the addresses |
"""
