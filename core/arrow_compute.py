"""`pyarrow.compute` as `pc`, untyped: its functions are made when it is imported, so type checkers see none of them."""

from __future__ import annotations

import importlib
from typing import Any, Final

pc: Final[Any] = importlib.import_module("pyarrow.compute")
