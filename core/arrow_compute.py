"""Arrow's compute functions under one name; they are made when the module is imported, so type checkers see none."""

from __future__ import annotations

import importlib
from typing import Any, Final

pc: Final[Any] = importlib.import_module("pyarrow.compute")
