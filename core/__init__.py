"""The acker framework: messages, tuples, shares, bolts, topologies, pending sources, and the engines that run them.

It knows nothing of Delta, of the ledger or of transactions: `stormproof.trident` and `stormproof.sinks` are above it.

| folder | question that it answers |
| --- | --- |
| `graph` | how is a topology built, checked, and compiled to stages |
| `bolt` | what does a user write as a bolt, and what calls it |
| `task` | what happens to record batches inside a task |
| `tracking` | how is it proven that no message is lost: shares, acker, verdict, attempts, bisection |
| `pending` | what is leased, waits for a retry, or is a dead letter: open, confirm, abort |
| `source` | where do messages come from: queue, files, memory, a client of your own; how are payloads decoded |
| `pulse` | how far is a task, and which message does it have in hand; does a job hang, or is it not heard of |
| `engine` | how does a batch become a Spark job; how does Spark get Java and Delta's jars |
| `storage` | how are files reached, on a disk and in an object store |
| `postgres` | which database, how is a connection set up, and the embedded server |

| module | question that it answers |
| --- | --- |
| `errors`, `guarantee`, `message` | which errors are there; what is promised; what is a message, and why did it fail |
| `settings` | what can be set; is a secret in a variable or in a file |
| `arguments`, `schema` | is an argument valid; how is a schema read |
| `user_functions`, `user_errors` | can a user's function be called; what does its exception mean for the message |
| `call_context` | which message is the call of a function for |
| `machine_faults`, `preflight` | is the machine to blame and not a message; can every machine run a task |
| `object_probe` | can every machine read and write a folder in an object store |
| `forks` | what may a fork of a driver or a function do |
| `cycle_collector` | where does Python's cycle collector run less often, and why |
| `job`, `sink` | what is one attempt at one batch; what does a task know of a sink |
| `lineage` | which transaction and which message made a row; messages' ids as columns |
| `dataset` | what do others call a table, a topic or a folder |
| `folds` | how is a value merged with the one that a sink holds; which row of a group is first or last |
| `python_to_arrow`, `arrow_compute`, `arrays` | how do values become columns |
| `extras` | which package that only some sources need is missing |
| `failpoint`, `clock` | where can a test kill a run; where does time come from |
| `trusted_paths`, `public_names` | may another user have written this file; which name does a class show |
"""
