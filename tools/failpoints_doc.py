"""Writes docs/failpoints.md from the registry in the code: `.venv/bin/python tools/failpoints_doc.py`."""

from __future__ import annotations

from pathlib import Path

from stormproof.core.failpoint import ACTIONS, ENV, ENV_LOG, FAILPOINTS

PATH = Path(__file__).resolve().parents[1] / "docs" / "failpoints.md"
HEAD = f"""# Failpoints

Places where a run can be made to die, to stand still or to fail. Made by `tools/failpoints_doc.py` from
`core/failpoint.py`: do not edit. Every one is reached by a test.

They are off unless `{ENV}` names one: `NAME=ACTION`, or `NAME=ACTION@K` for the K-th time that a process comes by;
several are joined by `;`. Actions: {", ".join(f"`{action}`" for action in ACTIONS)}. With `{ENV_LOG}=FILE` each place that
is reached appends its name to the file.

```sh
{ENV}='commit.after_sink=kill' stormproof run mine.py:weather --until-idle    # dies between its two sinks
stormproof run mine.py:weather --until-idle                                   # recovers
```

| name | where | reached in |
| --- | --- | --- |
"""
SCOPES = {
    "every": "every run",
    "recovery": "a recovery that finds something",
    "abort": "a batch that is given back",
    "retry": "a job that is tried again",
    "delta": "a commit to Delta",
    "postgres": "a commit to Postgres",
    "state": "a commit to a state",
    "stream": "a micro-batch that feeds a topology",
    "queue": "the queue itself",
    "journal": "a source whose server redelivers",
    "operator": "a decision about a dead letter",
    "audit": "`audit verify`",
    "reject": "a commit to a table that refuses a row",
    "group": "a commit to a table that refuses a group's row",
    "upkeep": "a compaction of a Delta table",
    "owed": "an at-least-once run whose source is not in the ledger's database",
}


def text() -> str:
    """The page."""
    rows = [f"| `{point.name}` | {point.about} | {SCOPES[point.scope]} |" for point in FAILPOINTS.values()]
    return HEAD + "\n".join(rows) + "\n"


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
