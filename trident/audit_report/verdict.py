"""The verdict in a report: one on record, or that of a verification; and which batches of its time it did not cover."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import sqlalchemy as sa

from stormproof.core.errors import Json, UsageError
from stormproof.trident.audit.ledger import LedgerSnapshot
from stormproof.trident.audit.report import NoticeKind, VerifyReport
from stormproof.trident.audit_report.plain import plain
from stormproof.trident.audit_report.wanted import Wanted
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
