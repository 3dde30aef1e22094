"""The reports of the tasks of one attempt, taken together: the verdict is taken over them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from stormproof.core.message import MessageFailure
from stormproof.core.sink import PreparedFile
from stormproof.core.tracking.component_counts import Counts

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
