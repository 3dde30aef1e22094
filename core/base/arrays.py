"""Names for the types of numpy arrays that pass between the parts of the core."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Words: TypeAlias = npt.NDArray[np.uint64]
"""64-bit words: shares, tokens and hashes."""

Rows: TypeAlias = npt.NDArray[np.int64]
"""Row numbers, ordinals or counts."""
