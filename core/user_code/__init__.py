"""A user's functions and what they return.

| module | question that it answers |
| --- | --- |
| `functions` | can a function be called; for which message is a call; what does its exception mean for the message |
| `python_to_arrow` | how do values become columns |
"""
