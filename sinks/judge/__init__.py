"""What a commit leaves out. How each store finds the rows that it refuses is in `delta` and `postgres`.

| module | question that it answers |
| --- | --- |
| `rejected_messages` | which messages does a commit reject where a table refuses a row |
"""
