"""The heartbeat: tasks report their progress, and the driver learns whether a job is alive and what its tasks had in hand.

Each running task reports how many rows it has worked on, whether it has ended, and, where the job is `careful`, the message
in hand. From this the driver learns whether a job hangs (`stormproof.trident.driver.jobs`), and which messages were
in hand when a worker, or the driver itself, died.

Each task has a TCP connection to the driver, also where both are on one machine. The driver writes down what is in hand in a
folder of its own, for the driver that takes over when it dies.

| module | question that it answers |
| --- | --- |
| `task` | what does a task call; what does it say to the driver, and how; which messages are suspects |
| `listener` | the driver's end: one thread for all tasks, what strangers can do there, which tasks are dead or silent |

*Not guaranteed*: a note does not survive a power loss. A dead worker looks as if it were running where its function had
forked a process that lives on. A note only decides what is tried first, never a result.
"""
