"""Where a slice is cut so that a culprit comes to stand alone."""

from __future__ import annotations

import math
from collections.abc import Iterable


def inner_ends(messages: int, suspects: Iterable[int]) -> list[int]:
    """The ordinals at which a slice of so many messages is cut, ascending.

    Each suspect (its ordinal in the slice, from 0) becomes a part of its own, what lies between them others. Where there
    is none, the slice is cut in halves, of which the first is the larger one; a single message is not cut.
    """
    cuts = {end for suspect in suspects for end in (suspect, suspect + 1)} - {0, messages}
    if not cuts and messages > 1:
        return [math.ceil(messages / 2)]
    return sorted(cuts)
