"""What a person decides: typed functions that change something, refuse, and leave a record of who and why.

They print nothing and ask nobody: the command line and the page confirm first, and show what a report's `lines()` say.

| module | decision |
| --- | --- |
| `letter_choice` | which dead letters there are, and which of them are meant |
| `dead_letters` | requeue, drop, edit a dead letter: a message that failed too often, or that a sink rejected |
| `canary` | dead letters are requeued in waves, while few enough of them fail |
| `driver` | pause, resume, drain, stop a driver |
| `refused_start` | a refused start goes on: other rows, a changed graph, a source's loss |
| `skips` | retry a blocked batch; give up its rows at a sink |
| `pruning` | the ledger is pruned: one topology of it, or all |
| `forget` | a topology is forgotten, or a queue's subscription |
| `adopt_table`, `adopt_queue` | which table is a sink's own; a queue changes its server |
| `upkeep` | the files of a topology's tables are compacted, vacuumed, repaired |
| `stores` | which database do decisions work on |
"""
