"""What a driver reports of its run: the statistics so far, a log line for each batch, and the caller's `on_batch`."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, replace

from stormproof.core.forks import kept_from_forks
from stormproof.core.message import storable_text
from stormproof.trident.statistics import BatchResult, RecoveryReport, RunStatistics
from stormproof.trident.tuning import Step

log = logging.getLogger("stormproof.txn")
tuning_log = logging.getLogger("stormproof.tuning")


class Accounts:
    """Counts and logs what one run does. `statistics` may be read from any thread."""

    def __init__(self, statistics: RunStatistics, on_batch: Callable[[BatchResult], None] | None) -> None:
        self.statistics = statistics
        self.taken = 0
        """Batches that this run has opened and ended; recovery's are not among them."""
        self._on_batch = on_batch

    def suppressed(self, duplicates: int) -> None:
        """Count commits of batches that a sink held already."""
        self.statistics = replace(self.statistics, suppressed=self.statistics.suppressed + duplicates)

    def recovered(self, report: RecoveryReport) -> None:
        """Count and log a recovery, if it found anything to do."""
        if not (report.did_something or report.took_over_from):
            return
        self.suppressed(len(report.suppressed))
        self.statistics = replace(self.statistics, recoveries=(*self.statistics.recoveries, report))
        log.info("recovered %s", json.dumps({"topology": self.statistics.topology, **asdict(report)}))

    def run_ended(self, elapsed_s: float, stopped: str) -> None:
        """Note how long the run took, and why it ended."""
        self.statistics = replace(self.statistics, elapsed_s=elapsed_s, stopped=stopped)

    def note_step(self, step: Step | None) -> None:
        """Log what the tuner decided, if anything."""
        if step is None:
            return
        level = logging.WARNING if step.below_reach else logging.INFO
        topology, below_reach = self.statistics.topology, step.below_reach
        line = {"topology": topology, "step": str(step), "why": step.why, "below_reach": below_reach}
        tuning_log.log(level, "tuning %s", json.dumps(line))

    def ended(self, result: BatchResult) -> None:
        """Count a batch, log it, and call the caller's function with its result."""
        self.statistics = s = self.statistics.after(result)
        line = {
            "topology": s.topology,
            "guarantee": s.guarantee,
            "epoch": s.epoch,
            **asdict(result),
            "outcome": result.outcome,
            "reason": storable_text(result.reason),
            "steps_ms": {name: round(value, 1) for name, value in result.steps_ms.items()},
        }
        log.info("txn %s", json.dumps(line))
        if self._on_batch is not None:
            with kept_from_forks():
                self._on_batch(result)
