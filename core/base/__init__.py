"""What every room uses. It imports no other room.

| module | question that it answers |
| --- | --- |
| `errors`, `guarantee`, `message` | which errors are there; what is promised; what is a message, and why did it fail |
| `arguments` | is an argument valid |
| `clock`, `failpoint` | where does time come from; where can a test kill a run |
| `machine_faults` | is the machine to blame, and not a message |
| `dataset` | what do others call a table, a topic or a folder |
| `arrays`, `arrow_compute` | what do Arrow's own functions lack |
| `extras` | which package that only some sources need is missing |
| `forks`, `cycle_collector` | what may a fork do; where does Python's cycle collector run less often, and why |
| `trusted_paths`, `public_names` | may another user have written this file; which name does a class show |
"""
