"""Decisions on the page: each is looked at first, confirmed with who and why, acted on once, and then shown.

Which there are, `trident/declarations/decisions.py` says.

| module | what is in it |
| --- | --- |
| `letters` | of dead letters: one, those selected, all that match; by a canary |
| `proposals` | what a form chooses; what was shown before a confirmation, and is acted on once; canaries that run |
| `pages` | the addresses |
"""
