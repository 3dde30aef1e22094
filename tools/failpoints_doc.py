"""Writes docs/failpoints.md from the registry in the code: `.venv/bin/python tools/failpoints_doc.py`."""

from __future__ import annotations

from pathlib import Path

from stormproof.core.base.failpoint import ACTIONS, ENV, ENV_LOG, FAILPOINTS, Failpoint

PATH = Path(__file__).resolve().parents[1] / "docs" / "failpoints.md"
HEAD = f"""# Failpoints

Named places where a run can be killed, paused or failed, to try how it recovers. Made by `tools/failpoints_doc.py` from
`core/base/failpoint.py`: do not edit.

```sh
{ENV}='commit.after_sink=kill' stormproof run mine.py:weather --until-idle    # dies between its two sinks
stormproof run mine.py:weather --until-idle                                   # recovers
```

`{ENV}` is `NAME=ACTION`, or `NAME=ACTION@K` for the K-th time that a process reaches the place; join several by `;`.
With `{ENV_LOG}=FILE` each place that is reached appends its name to the file.

| action | effect |
| --- | --- |
{{actions}}
"""
DID = {
    "kill": "SIGKILL to the process; in a Spark worker, to the driver",
    "worker": "SIGKILL to the process, also to a Spark worker",
    "pause": "SIGSTOP, until another process sends SIGCONT",
    "raise": "raises `FailpointReached`, a transient error",
    "error": "raises `FailpointError`, as a bug would",
}
SCOPES = {
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
    actions = "".join(f"| `{action}` | {DID[action]} |\n" for action in ACTIONS)
    parts = [HEAD.replace("{actions}\n", actions)]
    parts.append("## In every run\n\n" + "".join(f"- `{one.name}`: {one.about}\n" for one in _of("every")))
    rows = "".join(f"| {why} | `{'`, `'.join(one.name for one in _of(scope))}` |\n" for scope, why in SCOPES.items())
    parts.append(f"## Elsewhere\n\n| in | failpoints |\n| --- | --- |\n{rows}")
    return "\n".join(parts)


def _of(scope: str) -> list[Failpoint]:
    return [one for one in FAILPOINTS.values() if one.scope == scope]


if __name__ == "__main__":
    PATH.write_text(text(), encoding="utf-8")
