"""What the tasks of one attempt reported, taken together: what the verdict is given over."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from stormproof.core.message import MessageFailure
from stormproof.core.sink import PreparedFile


@dataclass(frozen=True, slots=True)
class JobReport:
    """What the successful tasks of one attempt reported.

    `read_messages` and `read_xor` are what the readers returned (messages, XOR of their tokens); `ack_xor` is the XOR
    of every acked share; `failures` are the messages that failed early; their tuples and acks are in nothing else here.
    `violations` are rows lost, doubled or tripled between stages, one text each.

    `late` are failures of messages whose tuples had gone on already (over an exchange, or into a bolt that may keep
    them): one entry a message and task, so a message may stand there more than once; `late_xor` is the XOR of the shares
    that ended in them, so that `ack_xor ^ late_xor` still accounts for every share. `together` has an (n, 2) array of the
    ids of messages that anchor one tuple together. `lost` is for per-message mode: messages whose own verdict was not
    "complete". `unanchored` is the number of tuples that failed and that no message anchored: nothing is replayed for them.
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
    lost: tuple[MessageFailure, ...] = ()
    unanchored: int = 0
