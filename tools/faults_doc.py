"""Writes docs/faults.md from the faults that the tests try: `.venv/bin/python tools/faults_doc.py`."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from support.fault_table import page  # noqa: E402

if __name__ == "__main__":
    (ROOT / "docs" / "faults.md").write_text(page(), encoding="utf-8")
