"""The acker framework: messages, tuples, shares, bolts, topologies, pending sources, and the engines that run them.

It knows nothing of Delta, of the ledger or of transactions: `stormproof.trident` and `stormproof.sinks` are above it.

| folder | question that it answers |
| --- | --- |
| `base` | which errors are there, what is promised, what is a message; where does time come from |
| `contract` | what is a source, and what is a sink; how are schemas and payloads read, and values folded |
| `graph` | how is a topology built, checked, and compiled to stages |
| `bolt` | what does a user write as a bolt, and what calls it |
| `task` | what is one attempt at one batch; what happens to record batches inside a task |
| `tracking` | how is it proven that no message is lost: shares, acker, verdict, attempts, bisection |
| `pending` | what is leased, waits for a retry, or is a dead letter: open, confirm, abort |
| `source` | where do messages come from: queue, files, memory, a client of your own |
| `user_code` | can a user's function be called, for which message is a call, what do its values and exceptions mean |
| `heartbeat` | how far is a task, and which message does it have in hand; does a job hang, or is it not heard of |
| `engine` | how does a batch become a Spark job; how does Spark get Java and Delta's jars |
| `start` | what can be set; can every machine run a task, and read and write the folders |
| `storage` | how are files reached, on a disk and in an object store |
| `postgres` | which database, how is a connection set up, and the embedded server |

No two folders import one another.
"""
