"""Writes docs/metrics.md from the metrics in the code: `.venv/bin/python tools/metrics_doc.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stormproof.trident.metrics import catalogue as m

PATH: Final = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
HEAD: Final = """# Metrics

What a driver tells Prometheus and OpenTelemetry, and what the ledger tells where no driver runs. Made by `tools/metrics_doc.py`
from `trident/metrics/catalogue.py`: do not edit.

## A driver's metrics

```sh
stormproof run mine.py:words --metrics-port 9400             # http://127.0.0.1:9400/metrics; 0: a free port, which is printed
stormproof run mine.py:words --until-idle --metrics-file /var/lib/node_exporter/words.prom     # a batch job
```

In code: `topology.run(metrics_port=9400)`, `topology.run(metrics_file="words.prom")`. The settings `metrics_port` and
`metrics_file` do the same, and are how a function for `foreachBatch` and `exactly_once(...)` get them:
`topology.foreach_batch(settings=Settings(metrics_port=9400))`.

- **Who can read them**: this machine alone. `metrics_host = "0.0.0.0"` lets a Prometheus on another machine in, and everybody
  else who reaches the port: there is no password. The values name topologies, sources and sinks; they have no payload, no message's
  id and no error's text.
- **A port that is taken is an error** before anything starts, and so is a file that cannot be written. A file that cannot be written
  later is a line in the log; the run goes on.
- **Several topologies in one process** that name the same port or the same file share it. Two processes need two.
- **A scrape asks nobody**: it copies numbers that lie in the driver's memory. The source is asked for its backlog by the driver's own
  thread, between two batches, at most every `metrics_interval_s` seconds and for at most a twentieth of the time.
- **Counters begin at 0 with each run**, as Prometheus expects; `rate` and `increase` know that. Those marked *exact* are counted
  right after the ledger has the same on record. So, over all lives of a topology's drivers, they sum up to what the ledger says,
  wherever a driver was killed. A COMMIT whose answer was lost is the exception: the ledger has it, and no driver counted it.
- A file is replaced in one step, every `metrics_interval_s` seconds and at the end. It stays when the driver ends. End its name
  in `.prom`, which is what node exporter reads.
- Both text formats are served: Prometheus' own, and OpenMetrics to whoever asks for it.

### OpenTelemetry

`metrics_opentelemetry = true` (`pip install 'stormproof[otel]'`) passes the same figures to OpenTelemetry's API, with the topology and
the labels as attributes: `stormproof_commit_latency_seconds` is `stormproof.commit_latency` with the unit `s`. Each batch is a span,
`batch of TOPOLOGY`, from its opening to its end, with attempts, sinks and the time of each step as events. Which SDK takes them,
and where it sends them, is your program's choice; without one the calls do nothing.

## The ledger's metrics

```sh
stormproof metrics                                                       # all topologies, in Prometheus' text format
stormproof metrics orders words --file /var/lib/node_exporter/stormproof.prom
```

An alert that a driver is gone must not depend on the driver. This command reads the ledger alone; run it every minute from a
timer. It needs the rights of an auditor.

```ini
# /etc/systemd/system/stormproof-metrics.service, with a .timer that has OnCalendar=minutely
[Service]
Type=oneshot
WorkingDirectory=/srv/pipelines
ExecStart=/srv/pipelines/.venv/bin/stormproof metrics --file /var/lib/node_exporter/stormproof.prom
```

## Alerts and a dashboard

`deploy/prometheus/alerts.yml` has rules for all that a person should hear of, and `deploy/prometheus/alerts_test.yml` their tests;
each alert has its part in the [runbook](runbook.md#alerts). `deploy/grafana/dashboard.json` is a dashboard: import it, and
choose your Prometheus. Tests check both files against the names and labels below.

## Every metric

Each has the label `topology`, but `stormproof_build_info`. A histogram has `_bucket`, `_sum` and `_count`; its buckets end at
{buckets} seconds.
"""
LABELS: Final = """
## Values of labels

| label | values |
| --- | --- |
"""


def text() -> str:
    """The page."""
    parts = [HEAD.replace("{buckets}", ", ".join(f"{bound:g}" for bound in m.BUCKETS_S))]
    for where, title in ((m.Where.DRIVER, "Of a driver"), (m.Where.LEDGER, "Of the ledger")):
        parts.append(f"\n### {title}\n\n| metric | kind | labels | meaning |\n| --- | --- | --- | --- |\n")
        parts += [_row(metric) for metric in m.METRICS if metric.where is where]
    parts.append(LABELS)
    for label, values in m.LABEL_VALUES.items():
        parts.append(f"| `{label}` | {_values(values)} |\n")
    for name, states in m.STATES.items():
        parts.append(f"| `state` of `{m.BY_NAME[name].exported}` | {_values(states)} |\n")
    return "".join(parts)


def _row(metric: m.Metric) -> str:
    labels = ", ".join(f"`{label}`" for label in metric.labels)
    exact = ", exact" if metric.exact else ""
    return f"| `{metric.exported}` | {metric.kind}{exact} | {labels} | {metric.help} |\n"


def _values(values: tuple[str, ...]) -> str:
    return ", ".join(f"`{value}`" if value else "(empty)" for value in values)


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
