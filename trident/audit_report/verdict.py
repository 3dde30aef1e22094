"""The verdict in a report: one on record, or that of a verification; and which batches of its time it did not cover.

And the limits of a report: everything that a reader might take for said, and is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import sqlalchemy as sa

from stormproof.core.errors import Json, UsageError
from stormproof.trident.audit.ledger import LedgerSnapshot
from stormproof.trident.audit.report import NoticeKind, VerifyReport
from stormproof.trident.audit_report.answers import NOW, NUMBERS
from stormproof.trident.audit_report.plain import Wanted, plain
from stormproof.trident.declarations.questions import QUESTIONS


def kept_verdict(snapshot: LedgerSnapshot, wanted: Wanted) -> dict[str, Any] | None:
    """The verdict on record that the report is to have; None: the verification is run.

    Raises:
        UsageError: there is none with this number.
    """
    if wanted.verdict is None:
        return None
    found = snapshot.connection.execute(
        sa.text(f"select * from {QUESTIONS['verdicts'].view} where topology = :topology and id = :id"),
        {"topology": wanted.topology, "id": wanted.verdict},
    ).mappings()
    row = found.one_or_none()
    if row is None:
        raise UsageError(
            f"topology {wanted.topology!r} has no verdict {wanted.verdict} on record; see: stormproof audit verdicts "
            f"{wanted.topology}",
            topology=wanted.topology,
        )
    return dict(row)


def verdict(kept: Mapping[str, Any] | None, checked: VerifyReport | None, totals: Mapping[str, Any]) -> Json:
    """What the report says: the kept verdict, or the verification's; where there is neither, "cannot_tell"."""
    if kept is not None:
        uncovered = not_covered(kept, totals)
        # A clean verdict on a part of the batches is none on all of them.
        so = "cannot_tell" if uncovered and kept["verdict"] in ("clean", "not_compared") else kept["verdict"]
        return plain({"from": "record", **kept, "verdict": so, "as_kept": kept["verdict"], "did_not_cover": uncovered})
    if checked is None:
        return {"from": "nothing", "verdict": "cannot_tell", "why": "no batch was opened in the time of this report"}
    # A blocked batch's notice quotes its reason, which may quote a value.
    notices = [
        replace(one, text=f"txid {one.txid} is blocked") if one.kind is NoticeKind.BLOCKED else one
        for one in checked.notices
    ]
    return plain(
        {
            "from": "verification",
            "verdict": checked.verdict,
            "reach": checked.reach,
            "first_txid": checked.first,
            "last_txid": checked.last,
            "pruned_upto": checked.pruned_upto,
            "recorded": checked.recorded,
            "not_recorded": checked.not_recorded,
            "checked": checked.checked,
            "deep": checked.deep,
            "proves": checked.proves,
            "tables": checked.tables if checked.deep else None,
            "violations": checked.violations,
            "unknowns": checked.unknowns,
            "notices": notices,
        }
    )


def not_covered(kept: Mapping[str, Any], scope: Mapping[str, Any]) -> list[Json]:
    """Batches of the report's time that a verdict on record did not look at."""
    first, last = scope["first"], scope["last"]
    if first is None:
        return []
    upto = kept["last_txid"] or 0
    found: list[Json] = []
    if kept["first_txid"] > first:
        found.append(f"Txids {first} to {min(kept['first_txid'] - 1, last)}: that verdict began behind them.")
    if upto < last:
        found.append(f"Txids {max(upto + 1, first)} to {last}: that verdict ended before them.")
    return found


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
