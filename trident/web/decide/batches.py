"""A batch that cannot go on: try it again, or give up its rows at one sink."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stormproof.core.errors import UsageError
from stormproof.trident.decisions import blocked, skips
from stormproof.trident.web.decide.action import Action, Choice, Done, Field, Given, Look
from stormproof.trident.web.decide.choosing import quoted

if TYPE_CHECKING:
    from stormproof.trident.stores import Stores

_TXID: Final = Field("txid", "Txid", "number", required=True)
_SINK: Final = Field("sink", "Sink", required=True)


def txid_of(choice: Choice) -> int:
    """The batch's number."""
    text = choice.text("txid")
    if text is None or not text.isascii() or not text.isdigit() or len(text) > 18:
        raise UsageError(f"the address lacks txid=, or {(text or '')[:40]!r} is none")
    return int(text)


def sink_of(choice: Choice) -> str:
    """The sink's name."""
    found = choice.text("sink")
    if found is None:
        raise UsageError("the address lacks sink=")
    return found


def _look_retry(stores: Stores, choice: Choice) -> Look:
    txid = txid_of(choice)
    row = blocked.require_blocked(stores, choice.topology, txid)
    with stores.audit.snapshot() as snapshot:
        (txn,) = snapshot.txns(row.incarnation, txid, txid)
    return Look(
        {"txid": str(txid), "state": txn.state.value, "messages": str(txn.messages)},
        said=(f"it is blocked: {txn.reason}",),
        command=f"stormproof retry {quoted(choice.topology)} {txid}",
    )


def _retry(stores: Stores, choice: Choice, look: Look, given: Given) -> Done:
    del look
    done = blocked.retry_txid(stores, choice.topology, txid_of(choice), by=given.by, why=given.why)
    return Done(tuple(done.lines()))


def _look_skip(stores: Stores, choice: Choice) -> Look:
    txid, sink = txid_of(choice), sink_of(choice)
    row = stores.topology(choice.topology)
    work = skips.require_skippable(stores, row, txid, sink)
    skips.require_refusing(stores, row, txid, sink)
    return Look(
        {"txid": str(txid), "sink": sink},
        work.rows,
        "row",
        command=f"stormproof ledger skip {quoted(choice.topology)} {txid} {quoted(sink)}",
    )


def _skip(stores: Stores, choice: Choice, look: Look, given: Given) -> Done:
    del look
    txid, sink = txid_of(choice), sink_of(choice)
    return Done(tuple(skips.skip_sink(stores, choice.topology, txid, sink, by=given.by, why=given.why).lines()))


def _look_skip_rows(stores: Stores, choice: Choice) -> Look:
    found = _look_skip(stores, choice)
    skips.row_skipper(stores, stores.topology(choice.topology), txid_of(choice), sink_of(choice))
    return Look(
        {**found.facts, "rows of the batch": str(found.count)},
        said=("how many of them its table refuses is known only when it commits the others",),
        command=f"{found.command} --rows",
    )


def _skip_rows(stores: Stores, choice: Choice, look: Look, given: Given) -> Done:
    del look
    txid, sink = txid_of(choice), sink_of(choice)
    return Done(tuple(skips.skip_rows(stores, choice.topology, txid, sink, by=given.by, why=given.why).lines()))


ACTIONS: Final = (
    Action(
        "retry",
        "Retry a blocked batch",
        "Retry",
        _look_retry,
        _retry,
        (_TXID,),
        about="It is prepared again, once its cause is repaired; the topology's next start commits it.",
    ),
    Action(
        "skip",
        "Skip a sink for a batch",
        "Give these rows up",
        _look_skip,
        _skip,
        (_TXID, _SINK),
        warning="The sink never gets these rows; they become rejects, on record.",
        about="The sink goes on from what it holds; the other sinks get the batch at the next start.",
    ),
    Action(
        "skip-rows",
        "Skip the rows that a sink refuses",
        "Give the refused rows up",
        _look_skip_rows,
        _skip_rows,
        (_TXID, _SINK),
        warning="The refused rows become rejects; the sink gets the others at once.",
        about="Postgres sinks only: every message whose rows the table takes is written.",
    ),
)
