"""The limits of a report: everything that a reader might take for said, and is not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from stormproof.core.errors import Json
from stormproof.trident.audit.report import NoticeKind, VerifyReport
from stormproof.trident.audit_report.answers import NOW, NUMBERS
from stormproof.trident.audit_report.plain import plain
from stormproof.trident.audit_report.verdict import not_covered
from stormproof.trident.audit_report.wanted import Wanted

_NOT_COMPARED: Final = (NoticeKind.NOT_COMPARED, NoticeKind.SUPERSEDED_NOT_COMPARED)


def not_looked_at(
    wanted: Wanted,
    told: Mapping[str, Any],
    kept: Mapping[str, Any] | None,
    checked: VerifyReport | None,
    left_out: Mapping[str, int],
) -> list[Json]:
    """Each limit as a sentence. `kept` is the verdict on record, `checked` the verification, if the report has one."""
    scope = told["scope"]
    found: list[Json] = [
        "Payloads, and the texts of errors, which may quote them: errors are told by their class.",
        "Messages that succeeded at their first attempt, one by one: they have no row of their own in the ledger.",
    ]
    if scope["pruned_upto"]:
        found.append(
            f"Batches up to txid {scope['pruned_upto']}: they were pruned, and what is left of them is no whole record."
        )
    if kept is not None:
        found.append(
            f"The tables, at the time of this report: the verdict is number {kept['id']} on record, of {plain(kept['at'])}."
        )
        if not kept["deep"]:
            found.append("The rows of the sinks' tables: that verdict is of the sinks' own records alone.")
        found += not_covered(kept, scope)
    elif checked is None:
        found.append("Ledger, sinks and source against each other: no batch was opened in the time of this report.")
    else:
        found.append(f"What the verdict does not prove. It proves: {checked.proves}")
        found += [f"Cannot be told: {one.text}" for one in checked.unknowns]
        if not checked.deep:
            found.append(
                "The rows of the sinks' tables: the verdict is of the sinks' own records alone (--deep reads them)."
            )
        found += [f"Rows of tables: {one.text}" for one in checked.notices if one.kind in _NOT_COMPARED]
    if wanted.since is not None or wanted.until is not None:
        names = ", ".join(str(number) for number in sorted(NUMBERS[one] for one in NOW))
        found.append(f"The report's time, in the answers to questions {names}: these are of the instant of the report.")
    for command, number in left_out.items():
        if number:
            found.append(
                f"{number} rows of question {NUMBERS[command]} ({command}), which has the newest {wanted.rows}."
            )
    if not wanted.messages:
        found.append("The histories of single messages: none was asked for (--message ID).")
    return found
