"""The pulse: tasks report their progress, and the driver learns whether a job is alive and what its tasks had in hand.

Each running task reports how many rows it has worked on, whether it has ended, and, where the job is `careful`, the message
in hand. From this the driver learns whether a job hangs (`stormproof.trident.lease_keeper`), and which messages were in hand
when a worker, or the driver itself, died.

There are two carriers. Where all tasks run on the driver's machine, or share a folder with it, each task has a file in its
job's folder. Else each task has a TCP connection to the driver, which asks for no shared disk.

| module | question that it answers |
| --- | --- |
| `record` | what does a task report; which messages are suspects |
| `task` | what does a task call, whichever carrier its job has |
| `protocol` | what is a carrier, to a task and to the driver |
| `folder` | how do files in a folder carry the reports |
| `wire` | what do the two ends of a connection say to each other |
| `connection` | a task's end of the connection: notes, heartbeats, and how it is made again |
| `listener` | the driver's end: one thread for all tasks, and what strangers can do there |
| `heard` | what was heard from a job's tasks; which are dead, and which are silent |

*Not guaranteed*: a note does not survive a power loss. A dead worker looks as if it were running where its function had
forked a process that lives on. A note only decides what is tried first, never a result.
"""
