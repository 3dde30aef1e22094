"""The tables of sinks: adopt another one, release one that was never written to; and the ledger's own size."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stormproof.core.clock import SystemClock
from stormproof.trident.decisions import adopt_table as adoption
from stormproof.trident.decisions import release_table as release
from stormproof.trident.prune import PruneReport, prune
from stormproof.trident.web.decide.action import Action, Choice, Done, Field, Given, Look
from stormproof.trident.web.decide.batches import sink_of
from stormproof.trident.web.decide.choosing import quoted
from stormproof.trident.wording import counted, parse_age

if TYPE_CHECKING:
    from datetime import datetime

    from stormproof.trident.stores import Stores

_SINK: Final = Field("sink", "Sink", required=True)
PRUNED: Final = "30d"


def _look_adopt(stores: Stores, choice: Choice) -> Look:
    sink, accepts = sink_of(choice), choice.is_on("accept_loss")
    loss = adoption.loss_at(stores, choice.topology, sink, accept_loss=accepts)
    binding = stores.binding(stores.topology(choice.topology), sink)
    option = " --accept-loss" if accepts else ""
    command = f"stormproof ledger adopt-table {quoted(choice.topology)} {quoted(sink)}{option}"
    facts = {"sink": sink, "table": binding.target, "known as": binding.table_id}
    if loss is None:
        return Look(facts, said=("nothing is lost, as far as can be told",), command=command)
    facts = {**facts, "gives up txids": loss.txids}
    return Look(facts, loss.rows, "row", said=(f"the table has {counted(loss.found, 'row')} now",), command=command)


def _adopt(stores: Stores, choice: Choice, look: Look, given: Given) -> Done:
    del look
    accepts = choice.is_on("accept_loss")
    done = adoption.adopt_table(
        stores, choice.topology, sink_of(choice), accept_loss=accepts, by=given.by, why=given.why
    )
    return Done(tuple(done.lines()))


def _look_release(stores: Stores, choice: Choice) -> Look:
    sink = sink_of(choice)
    _, binding = release.require_releasable(stores, choice.topology, sink)
    command = f"stormproof ledger release-table {quoted(choice.topology)} {quoted(sink)}"
    return Look({"sink": sink, "table": binding.target, "known as": binding.table_id}, command=command)


def _release(stores: Stores, choice: Choice, look: Look, given: Given) -> Done:
    del look
    done = release.release_table(stores, choice.topology, sink_of(choice), by=given.by, why=given.why)
    return Done(tuple(done.lines()))


def _look_prune(stores: Stores, choice: Choice) -> Look:
    age = choice.text("older_than") or PRUNED
    now = SystemClock().now()
    report = _pruned(stores, choice, now - parse_age(age), now, by="", why="", dry_run=True)
    rows = sum(report.removed.values())
    return Look(
        {},
        rows,
        "row",
        (now - parse_age(age), now),
        (f"batches that ended more than {age} ago", *report.lines()),
        nothing=None if rows else "Nothing is old enough to be pruned.",
        command=f"stormproof ledger prune {quoted(choice.topology)} --older-than {quoted(age)}",
    )


def _prune(stores: Stores, choice: Choice, look: Look, given: Given) -> Done:
    before, now = look.pinned
    return Done(tuple(_pruned(stores, choice, before, now, by=given.by, why=given.why, dry_run=False).lines()))


def _pruned(
    stores: Stores, choice: Choice, before: datetime, now: datetime, *, by: str, why: str, dry_run: bool
) -> PruneReport:
    what = (stores.ledger, stores.audit, choice.topology)
    return prune(*what, ended_before=before, now=now, by=by, why=why, dry_run=dry_run)


ACTIONS: Final = (
    Action(
        "adopt-table",
        "Adopt a table",
        "Adopt this table",
        _look_adopt,
        _adopt,
        (_SINK, Field("accept_loss", "Give up rows that are gone", "checkbox", "on record")),
        warning="Rows that are given up are not written again, and their messages are not handed out again.",
        about="The table that has the sink's name now becomes the sink's own: after a restore, or another ALTER.",
    ),
    Action(
        "release-table",
        "Release a table",
        "Release",
        _look_release,
        _release,
        (_SINK,),
        about="A table that this topology claimed and never wrote to is free for another one.",
    ),
    Action(
        "prune",
        "Prune the ledger",
        "Prune",
        _look_prune,
        _prune,
        (Field("older_than", "Older than", hint="as 30d, 12h, 2w; default 30d"),),
        warning="The record of these batches is removed; the audit then begins after them, and says so.",
        about="What a sink, a waiting message or an open batch needs stays, as do rejects and decisions.",
    ),
)
