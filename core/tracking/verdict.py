"""The batch verdict: do the acked shares of a whole batch XOR to the tokens of its messages, and do the counts agree?

The XOR of many messages' ack vals is again one 64-bit value. It is zero when every tuple anchored to them was acked, and
otherwise only by an accident of probability 2^-64. An XOR is blind to copies where a row comes an odd number of times: so
messages are counted, and `stormproof.core.task.exchange` counts the rows between stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import reduce
from operator import xor
from typing import Final

import numpy as np
import numpy.typing as npt

from stormproof.core.base.message import MessageFailure
from stormproof.core.contract.sink import PreparedFile
from stormproof.core.contract.source import Expectation
from stormproof.core.tracking.component_counts import Counts

# ---- the reports of the tasks of one attempt, taken together: the verdict is taken over them

ANY_KEY: Final = 0
"""The key in `JobReport.met` of messages that cannot be told apart after a group: any key."""


@dataclass(frozen=True, slots=True)
class JobReport:
    """What the successful tasks of one attempt reported.

    `read_messages` is the number of messages that the readers returned, `read_xor` the XOR of their tokens. `ack_xor` is
    the XOR of every acked share. `failures` are the messages that failed early; nothing else in here includes their tuples
    or acks. `violations` has a text for each loss or copy of rows between stages.

    `late` are failures of messages whose tuples had gone on already, over an exchange or into a bolt that may keep them.
    Each task names a message once, so a message may be named more than once. `late_xor` is the XOR of the shares that ended
    in these failures: `ack_xor ^ late_xor` accounts for every share. `together` is an (n, 2) array of the ids of messages
    that anchor one tuple together. `met` has the id of each message that reached a component at which messages meet, beside
    a hash of the component and the key. `lost` are the messages that were incomplete in per-message mode. `unnamed` is the
    number of failures of messages that no task named, since it had named enough; above 0, nothing else in here adds up.
    `unanchored` is the number of failed tuples that no message anchored: nothing is replayed for them. `counts` tell what
    each component did.
    """

    read_messages: int
    read_xor: int
    ack_xor: int
    failures: tuple[MessageFailure, ...] = ()
    files: tuple[PreparedFile, ...] = ()
    violations: tuple[str, ...] = ()
    tuples: int = 0
    steps_ms: Mapping[str, float] = field(default_factory=dict[str, float])
    late: tuple[MessageFailure, ...] = ()
    late_xor: int = 0
    together: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    met: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty((0, 2), np.int64))
    lost: tuple[MessageFailure, ...] = ()
    unnamed: int = 0
    unanchored: int = 0
    counts: Counts = field(default_factory=Counts)

    @property
    def named(self) -> tuple[MessageFailure, ...]:
        """All failures; a message may be among them more than once."""
        return (*self.failures, *self.late, *self.lost)


def misread(report: JobReport, expected: Expectation) -> tuple[str, ...]:
    """The differences between the messages that were read and those that were opened, one text each.

    A failed message never explains such a difference.
    """
    found: list[str] = []
    if report.read_messages != expected.messages:
        found.append(f"{expected.messages} messages were opened, {report.read_messages} were read")
    if report.read_xor != expected.xor:
        found.append("the messages that were read are not those that were opened (XOR of tokens differs)")
    return tuple(found)


def mismatches(
    report: JobReport, expected: Expectation, *, tracked: bool, per_message: bool = False
) -> tuple[str, ...]:
    """What does not add up in an attempt, one text each; empty is the verdict "complete".

    `expected` was computed apart from the read. Messages that failed early are named with their tokens, and only those
    tokens are taken off: a failed message never explains the loss of another. A share that ended in a late failure was
    counted where it ended, so acks and late failures together account for every share.

    Where ackers took a verdict for each message (`per_message`) and named some as lost, the XOR over all of them is not
    compared: every other message has a verdict of its own.
    """
    found = [*report.violations, *misread(report, expected)]
    failed_ids = {failure.id for failure in report.failures}
    if len(failed_ids) != len(report.failures):
        found.append(f"{len(report.failures)} failures name {len(failed_ids)} messages: a report was counted twice")
    if tracked and not (per_message and report.lost):
        failed = reduce(xor, (failure.token for failure in report.failures), 0)
        if report.ack_xor ^ report.late_xor != expected.xor ^ failed:
            found.append("the ack val is not zero: tuples were lost or doubled on their way to the sinks")
    return tuple(found)
