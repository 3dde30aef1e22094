"""A topology's driver: takes each batch from open to finish, and after any crash.

| module | question that it answers |
| --- | --- |
| `run`, `opening` | how does a run start; is each machine fit, and each sink on its own table |
| `options` | how does a run go about its batches |
| `tuning` | how large is a batch, and how many are in flight, set or tuned to a latency |
| `outages` | how long is a store waited for |
| `coordinator` | takes each batch from open to finish: when is the next one opened, one of retries, or none |
| `steps` | how is a batch opened, prepared, committed and finished; when are messages confirmed |
| `batch_records` | what are the ledger, the log and the observers told of a batch; how much may sinks reject, what is said |
| `recovery` | what does the next start do after a crash; what is written where a table refuses a group's row |
| `jobs` | what is in flight; on which threads do jobs and commits run |
| `leases` | who extends leases, and cancels a job that hangs |
| `control_line` | what is a running driver asked to do; who asks: an operator, a signal |
| `dry_run` | what would a commit, a start and the next batch do |
"""
