"""A user's functions and what they return.

| module | question that it answers |
| --- | --- |
| `functions` | can a function be called; for which message is a call; what do its values and exceptions become |
"""
