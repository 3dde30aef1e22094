"""Writes docs/metrics.md from the metrics in the code: `.venv/bin/python tools/metrics_doc.py`."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stormproof.trident.telemetry import catalogue as m

PATH: Final = Path(__file__).resolve().parents[1] / "docs" / "metrics.md"
HEAD: Final = """# Metrics

For Prometheus and OpenTelemetry. Made by `tools/metrics_doc.py` from `trident/telemetry/catalogue.py`: do not edit.

## A driver's metrics

```sh
stormproof run mine.py:words --metrics-port 9400             # http://127.0.0.1:9400/metrics; 0: a free port, printed
```

In code: `topology.run(metrics_port=9400)`, or the setting `metrics_port`, also for functions of `foreachBatch` and
`exactly_once(...)`. After a batch job, which nobody scrapes in time, have `stormproof metrics` write the ledger's.

- `metrics_host = "0.0.0.0"` serves other machines, without a password. Metrics contain no payloads, message ids or error
  texts.
- Topologies of one process may share a port; two processes may not.
- Counters begin at 0 with each run; use `rate` and `increase`. *Exact* ones add up to the ledger over all runs, wherever a
  driver was killed, except for a COMMIT whose answer was lost.
- The backlog is queried at most every 15 seconds.

`metrics_opentelemetry = true` (extra `otel`) passes them to OpenTelemetry's API: topology and labels are attributes,
and `stormproof_commit_latency_seconds` is `stormproof.commit_latency` in `s`. Each batch is a span. Your program sets
up the SDK.

## The ledger's metrics

They need no driver: run this every minute, with the rights of an auditor.

```ini
# /etc/systemd/system/stormproof-metrics.service, with a .timer that has OnCalendar=minutely
[Service]
Type=oneshot
WorkingDirectory=/srv/pipelines
ExecStart=/srv/pipelines/.venv/bin/stormproof metrics --file /var/lib/node_exporter/stormproof.prom
```

## Alerts and a dashboard

`deploy/prometheus/alerts.yml`, with the [runbook](runbook.md#alerts), and `deploy/grafana/dashboard.json`.

## Every metric

All but `stormproof_build_info` have the label `topology` beside those in braces. Histograms have buckets up to {buckets} seconds.
"""
LABELS: Final = """
## Values of labels

"""


def text() -> str:
    """The page."""
    parts = [HEAD.replace("{buckets}", ", ".join(f"{bound:g}" for bound in m.BUCKETS_S))]
    for where, title in ((m.Where.DRIVER, "Of a driver"), (m.Where.LEDGER, "Of the ledger")):
        parts.append(f"\n### {title}\n\n")
        parts += [_row(metric) for metric in m.METRICS if metric.where is where]
    parts.append(LABELS)
    for label, values in m.LABEL_VALUES.items():
        parts.append(f"- `{label}`: {_values(values)}\n")
    for name, states in m.STATES.items():
        parts.append(f"- `state` of `{m.BY_NAME[name].exported}`: {_values(states)}\n")
    return "".join(parts)


def _row(metric: m.Metric) -> str:
    labels = f"{{{','.join(metric.labels)}}}" if metric.labels else ""
    exact = ", exact" if metric.exact else ""
    return f"- `{metric.exported}{labels}` ({metric.kind}{exact}): {metric.help}\n"


def _values(values: tuple[str, ...]) -> str:
    return ", ".join(f"`{value}`" if value else "(empty)" for value in values)


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
