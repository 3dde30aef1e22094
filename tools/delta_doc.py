"""Writes docs/delta.md from the matrix of features in the code: `.venv/bin/python tools/delta_doc.py`."""

from __future__ import annotations

from pathlib import Path

from stormproof.sinks.delta.features import as_markdown

PATH = Path(__file__).resolve().parents[1] / "docs" / "delta.md"
HEAD = """# Delta tables

Made by `tools/delta_doc.py` from `sinks/delta/features.py`: do not edit.

`DeltaSink(path)` writes to a table that it makes, or to one that is there already. The table's features decide who writes:

- **delta-rs**, wherever it can: it commits in some 20 ms, and needs no JVM.
- **delta-spark** otherwise: it writes every feature that the table below gives it, in a second or two a commit.
- A table that neither would write without harm is **refused** by the name of the feature, when the run starts and again in
  each commit. Nothing is written then.

## Which table is written by whom

A table that has several features is refused where one of them is; otherwise one that needs delta-spark is enough.

"""


def text() -> str:
    """The page."""
    return HEAD + as_markdown()


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
