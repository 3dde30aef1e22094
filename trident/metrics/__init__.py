"""Metrics: the figures of a driver while it runs, and of the ledger where none does.

| module | question that it answers |
| --- | --- |
| `catalogue` | which metrics are there, with which names, labels and units; where do a run's values lie |
| `recorder` | what of a run's steps becomes which value; what is exported; when is a source asked for its backlog |
| `exposition` | how does Prometheus read the values: its formats, over HTTP, from a file; what of the ledger |
| `otel` | how does OpenTelemetry get them, with a span for each batch |
"""
