"""`--canary` of `dead-letters requeue`: its options, its progress, and how it ended."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from stormproof.core.errors import UsageError
from stormproof.trident.cli.output import Exit, emit, finish, note, say
from stormproof.trident.decisions.canary import WAIT_S, CanaryEnd, CanaryReport, CanaryRules

Canary = Annotated[
    int | None,
    typer.Option(
        "--canary", min=1, metavar="N", help="Hand out N first; the rest in growing waves, while few enough fail."
    ),
]
MaxFailures = Annotated[
    float | None,
    typer.Option(
        "--max-failures", metavar="SHARE", help="With --canary: share of a wave that may fail, as 0.05. Default: 0."
    ),
]
Wait = Annotated[
    float | None,
    typer.Option(
        "--wait", metavar="SECONDS", help="With --canary: how long each wave may take to be decided. Default: 300."
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only count what would be decided about.")]


def rules_of(first: int | None, max_failures: float | None, wait_s: float | None) -> CanaryRules | None:
    """The rules that the options name; None: no canary.

    Raises:
        UsageError: a canary's option without `--canary`, or a value out of range.
    """
    if first is None:
        if max_failures is not None or wait_s is not None:
            raise UsageError("--max-failures and --wait belong to --canary N")
        return None
    return CanaryRules(first, 0.0 if max_failures is None else max_failures, WAIT_S if wait_s is None else wait_s)


def progress() -> Callable[[CanaryReport], None]:
    """Says on standard error what changed."""
    said: list[str] = []

    def told(report: CanaryReport) -> None:
        now = report.lines()[len(report.waves) - 1]
        if [now] != said[-1:]:
            said.append(now)
            note(now)

    return told


def show_canary(report: CanaryReport, *, as_json: bool) -> None:
    """Print how a canary ended; status 1 if something was not handed out, or was not decided."""
    emit(report, as_json=as_json, text=lambda: say("\n".join(report.lines())))
    finish(Exit.DONE if report.end is CanaryEnd.DONE else Exit.FAILED)
