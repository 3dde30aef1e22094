"""Delta tables as a sink: appends by adoption of prepared files, folds by MERGE; committed by delta-rs."""

from __future__ import annotations

from stormproof.sinks.delta.sink import DeltaSink

__all__ = ["DeltaSink"]
