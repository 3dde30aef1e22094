"""A user's functions and what they return.

| module | question that it answers |
| --- | --- |
| `functions`, `exceptions` | can a function be called; what does its exception mean for the message |
| `call_context` | which message is the call of a function for |
| `python_to_arrow` | how do values become columns |
"""
