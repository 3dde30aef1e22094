"""Transactions over the core's batches: what a topology's driver does, from `open` to `finish`, and after any crash.

| folder | question that it answers |
| --- | --- |
| `ledger` | what was opened, prepared, committed and replayed: the record in Postgres, with the fence of older drivers |
| `state` | which maps can a topology keep across batches, and what does a replayed txid find there |
| `streaming` | how does a Structured Streaming query feed Stormproof: `foreach_batch` |
| `declarations` | which questions can be asked, and what can be decided: command, page and reference are made from it |
| `audit` | do ledger, sinks and source tell one story; what became of a message |
| `decisions` | what can a person decide about a topology, its messages and its tables; what is refused, and recorded |
| `metrics` | what does a driver tell Prometheus and OpenTelemetry; what does the ledger, where none runs |
| `openlineage` | what is a lineage server told of each batch |
| `cli` | what does each command of `stormproof` do |
| `web` | how are all of a ledger's topologies shown in a browser |

| module | question that it answers |
| --- | --- |
| `stream`, `runnable_topology`, `explain` | how does a user write a topology, run it, and see what it compiles to |
| `aggregate` | what is computed of groups; what is kept across batches |
| `run`, `opening`, `sessions` | how does a run start; is each machine fit, and each sink on its own table |
| `options` | how does a run go about its batches; how long is a store waited for |
| `coordinator` | takes each batch from open to finish: when is the next one opened, one of retries, or none |
| `steps`, `transaction_states` | how is a batch opened, prepared, committed and finished; when are messages confirmed |
| `batch_records` | what are the ledger, the log and the observers told of a batch; how much may sinks reject, what is said |
| `recovery` | what does the next start do after a crash; what is written where a table refuses a group's row |
| `job_runners` | what is in flight; on which threads do jobs and commits run |
| `watched_job` | who extends leases, and cancels a job that hangs |
| `control_line` | what is a running driver asked to do; who asks: an operator, a signal |
| `read_already` | how does at-most-once run a retry, whose payload is gone with its confirm |
| `tuning` | how large is a batch, and how many are in flight; how is that tuned to a latency |
| `dry_run` | what would a commit, a start and the next batch do |
| `stores`, `wording` | which database do decisions work on; how are counts and times written, and tables in a notebook |
| `observers` | who is told what becomes of each batch; what does a run count |
| `grants` | GRANTs |
"""
