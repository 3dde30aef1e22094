"""Telemetry: the metrics of a driver while it runs, and of the ledger where none does; spans and lineage of each batch.

| module | question that it answers |
| --- | --- |
| `catalogue` | which metrics are there, with which names, labels and units; where do a run's values lie |
| `recorder` | what of a run's steps becomes which value; what is exported, without a driver that waits |
| `exposition` | how does Prometheus read the values: its formats, over HTTP, from a file; what of the ledger |
| `otel` | how does OpenTelemetry get them, with a span for each batch |
| `lineage` | what does OpenLineage get told of a batch, under which run's id; which batches are summed up |
"""
