"""`stormproof metrics`: the ledger's figures for Prometheus, whether or not a driver runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from stormproof.core.base.clock import SystemClock
from stormproof.core.base.errors import UsageError
from stormproof.trident.cli.options import opened
from stormproof.trident.cli.output import emit, printed
from stormproof.trident.telemetry.catalogue import Distribution, MetricValue
from stormproof.trident.telemetry.exposition import ledger_figures, registry_with, replace_text, text_of


def export(topologies: Sequence[str] | None, *, file: str | None, as_json: bool) -> None:
    """Print the figures, or write them to a file that readers never see in part.

    Raises:
        UsageError: no such topology, or the file cannot be written.
    """
    with opened() as stores:
        samples = ledger_figures(stores.audit, tuple(topologies or ()), SystemClock().now())
    text = text_of(registry_with(lambda: samples))
    if file is not None:
        try:
            replace_text(Path(file), text)
        except OSError as error:
            raise UsageError(f"--file {file} cannot be written: {error.strerror or error}") from error
    report = {"file": file, "metrics": [_json(sample) for sample in samples]}
    emit(report, as_json=as_json, text=lambda: printed(text.rstrip("\n") if file is None else f"wrote {file}"))


def _json(sample: MetricValue) -> dict[str, object]:
    assert not isinstance(sample.value, Distribution)
    labels = dict(zip(sample.metric.label_names, sample.labels, strict=True))
    return {"name": sample.metric.exported, "labels": labels, "value": sample.value}
