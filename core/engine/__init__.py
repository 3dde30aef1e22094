"""The engines that run a batch's job: Spark, and one process without a JVM.

In the tasks of both runs `stormproof.core.task`.

| module | question that it answers |
| --- | --- |
| `protocol` | what does an engine do |
| `spark` | how is a batch one Spark job, with its stages joined by exchanges |
| `small_jobs` | which jobs are run in one process |
| `spark_lines` | what differs between the lines of Spark that are served |
| `spark_settings` | which settings does a Spark session get: ours, the user's, those that were submitted |
| `executors`, `executor_look` | what does each executor of a cluster have, before the first batch: asked by one small job |
| `inline` | how does a batch run in this process, for tests and first steps |
| `frame` | how are the rows of a DataFrame written for a micro-batch |
| `shipping` | how do functions reach Spark's workers, and what cannot be pickled |
| `spark_error` | what really happened, in an error of Spark's |
| `worker` | how is a worker's memory bounded; how does an idle worker end |
| `archive` | how does the package reach executors that do not have it |
| `java`, `delta_jars` | which Java does Spark get; where do Delta's jars come from |
"""
