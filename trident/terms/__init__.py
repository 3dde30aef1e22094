"""The words that all of Trident's rooms share.

| module | which |
| --- | --- |
| `transaction_states` | the states of a batch and their moves; causes, events, decisions |
| `observers` | what is told of each batch, and to whom; what a run counts |
| `wording` | how counts and times are written |
"""
