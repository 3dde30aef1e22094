"""What each sink would take of the next batch, and which messages it would reject: found as a commit does, in memory.

Where a row of a group does not fit, the job runs again for that sink alone, without the messages that the row names: see
`stormproof.trident.recount`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from stormproof.core.engine.inline import InlineEngine
from stormproof.core.errors import SinkRefused
from stormproof.core.job import Job
from stormproof.core.message import MessageId
from stormproof.core.sink import PreparedFile, SinkWriter, files_of
from stormproof.core.tracking.report import JobReport
from stormproof.core.tracking.together import touched_by
from stormproof.sinks.preview import RowsPreview
from stormproof.sinks.preview_rejects import examples_of, rows_without_misfits
from stormproof.sinks.protocol import PROBLEM, RefusedRow, SinkProblem
from stormproof.sinks.rejects import GroupsRefused
from stormproof.sinks.stand_ins import WritesNothing
from stormproof.sinks.writer import FileWriter
from stormproof.trident.recount import RECOUNTS_MAX, too_many

NOTHING_TOGETHER: Final = np.empty((0, 2), np.int64)


def kept_in(folder: str, writers: Mapping[str, SinkWriter]) -> dict[str, SinkWriter]:
    """The writers; those that leave out misfits write to this folder, so that their files can be read."""
    return {
        name: replace(writer, directory=folder) if isinstance(writer, FileWriter) and writer.leaves_out else writer
        for name, writer in writers.items()
    }


@dataclass(frozen=True, slots=True)
class RehearsedCommit:
    """The commit of a batch that `engine` ran as `job`. Each sink may reject `most` messages of it; None: none."""

    engine: InlineEngine
    job: Job
    most: int | None

    def of_sink(self, sink: str, files: Sequence[PreparedFile]) -> RowsPreview:
        """What the sink would take of the files that the job wrote for it."""
        writer = self.job.writers[sink]
        if not isinstance(writer, FileWriter) or not writer.leaves_out:
            return RowsPreview.of(files)
        left_out, named, together = list[RefusedRow](), set[int](), NOTHING_TOGETHER
        error: SinkRefused | None = None
        for again in range(RECOUNTS_MAX + 1):
            if error is not None:
                report = self._again(sink, again, frozenset(named))
                if report.failures or report.late or report.lost:
                    break
                together, files = report.together, files_of(report.files, sink)
            try:
                found = rows_without_misfits(writer, files, self.most, of_groups=error is not None)
            except SinkRefused as refused:
                unnamed = error is None and refused.details.get(PROBLEM) == SinkProblem.MESSAGES_UNKNOWN
                error = refused
                if not self.most or not self.job.tracked or not (unnamed or isinstance(refused, GroupsRefused)):
                    break
                if isinstance(refused, GroupsRefused):
                    left_out += refused.rows
                    named |= {number for row in refused.rows for number, _ in row.messages}
                    named |= touched_by({MessageId(number) for number in named}, together).keys()
                if len(named) > self.most:
                    error = too_many(refused, self.most)
                    break
            else:
                if not left_out:
                    return found
                return replace(found, rejected=len(named), examples=examples_of(left_out))
        assert error is not None
        return replace(RowsPreview.of(files), rows=0, blocked=error.message)

    def _again(self, sink: str, again: int, left_out: frozenset[int]) -> JobReport:
        writers = {
            name: writer if name == sink else WritesNothing(name, writer) for name, writer in self.job.writers.items()
        }
        return self.engine.run(
            replace(
                self.job,
                writers=writers,
                attempt=self.job.attempt + again,
                excluded=self.job.excluded | left_out,
                per_message=True,
            )
        )
