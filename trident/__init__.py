"""Transactions over the core's batches: what a topology's driver does, from `open` to `finish`, and after any crash.

| folder | question that it answers |
| --- | --- |
| `ledger` | what was opened, prepared, committed and replayed: the record in Postgres, with the fence of older drivers |
| `state` | which maps can a topology keep across batches, and what does a replayed txid find there |
| `streaming` | how does a Structured Streaming query feed Stormproof: `foreach_batch` |
| `declarations` | which questions can be asked, and what can be decided: command, page and reference are made from it |
| `audit` | do ledger, sinks and source tell one story; what became of a message |
| `decisions` | what can a person decide about a topology, its messages and its tables; what is refused, and recorded |
| `audit_report` | what is an auditor handed; is such a file as it was signed |
| `metrics` | what does a driver tell Prometheus and OpenTelemetry; what does the ledger, where none runs |
| `openlineage` | what is a lineage server told of each batch |
| `cli` | what does each command of `stormproof` do |
| `web` | how are all of a ledger's topologies shown in a browser |

| module | question that it answers |
| --- | --- |
| `stream`, `runnable_topology`, `explain` | how does a user write a topology, run it, and see what it compiles to |
| `aggregate` | what is computed of groups; what is kept across batches |
| `run`, `options`, `opening`, `sessions` | how does a run start; is each machine fit, and each sink on its own table |
| `coordinator` | takes each batch from open to finish: when is the next one opened, one of retries, or none |
| `steps`, `transaction_states` | how is a batch opened, prepared, committed and finished; when are messages confirmed |
| `batch_records` | what are the ledger, the log and the observers told of a batch; what does a run count |
| `component_counts` | which of a job's counts does the ledger keep, with the failures of a batch |
| `recovery` | what does the next start do after a crash |
| `job_runners` | what is in flight; on which threads do jobs and commits run |
| `watched_job`, `lease_keeper` | who extends leases, and cancels a job that hangs |
| `job_progress` | how far is the job of a batch, while it runs |
| `control_line`, `stopping` | what is a running driver asked to do; who asks: an operator, a signal |
| `recount` | what does a batch write to a sink whose table refuses a group's row |
| `read_already` | how does at-most-once run a retry, whose payload is gone with its confirm |
| `blocked_error`, `outages` | how much may sinks reject, what is said where one refuses; how long is a store waited for |
| `tuning`, `latency_tuner` | how large is a batch, and how many are in flight; how is that tuned to a latency |
| `dry_run`, `start_preview` | what would a commit, and a start do |
| `topology_rehearsal` | what would the next batch do; which messages would sinks reject |
| `statistics` | what does a run count |
| `stores`, `wording` | which database do decisions work on; how are counts and times written, and tables in a notebook |
| `observers` | who is told what becomes of each batch |
| `prune`, `grants` | how is the ledger pruned; GRANTs |
"""
