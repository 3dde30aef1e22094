"""A task's note of the message in hand, made outside a loop over rows."""

from __future__ import annotations

import numpy as np

from stormproof.core.pulse.task import Pulse


def note(pulse: Pulse, message: int) -> None:
    """Leave this message noted as the one in hand, where the pulse is careful."""
    pulse.at(np.array([message], np.int64))
    next(pulse.each([message]))
