"""What every room uses. It imports no other room.

| module | question that it answers |
| --- | --- |
| `errors`, `message` | which errors are there; what is a message, what is promised of it, and why did it fail |
| `arguments` | is an argument valid |
| `clock`, `failpoint` | where does time come from; where can a test kill a run |
| `machine_faults` | is the machine to blame, and not a message |
| `extras` | which package is missing |
| `dataset` | what do others call a table, a topic or a folder |
| `arrow` | which arrays pass between the parts; what do Arrow's own functions lack |
| `process` | what may a fork do; where does Python's cycle collector run less often, and why |
| `trusted_paths`, `public_names` | may another user have written this file; which name does a class show |
"""
