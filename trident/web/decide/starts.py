"""A refused start, and what stays on record: adopt another incarnation's rows, accept a changed graph, accept a loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stormproof.trident.decisions import losses, starts
from stormproof.trident.web.decide.action import Action, Choice, Done, Field, Given, Look
from stormproof.trident.web.decide.choosing import quoted

if TYPE_CHECKING:
    from stormproof.trident.stores import Stores


def _look_adopt(stores: Stores, choice: Choice) -> Look:
    incarnation = choice.text("incarnation")
    row = stores.topology(choice.topology)
    if incarnation is None:
        return Look({}, nothing="Name the incarnation, as the refused start does.")
    starts.require_other_incarnation(stores, choice.topology, incarnation)
    return Look(
        {"its own incarnation": row.incarnation, "adopts": incarnation},
        command=f"stormproof ledger adopt {quoted(choice.topology)} {quoted(incarnation)}",
    )


def _adopt(stores: Stores, choice: Choice, look: Look, given: Given) -> Done:
    incarnation: str = look.facts["adopts"]
    done = starts.adopt_incarnation(stores, choice.topology, incarnation, by=given.by, why=given.why)
    return Done(tuple(done.lines()))


def _look_accept(stores: Stores, choice: Choice) -> Look:
    fingerprint = choice.text("fingerprint")
    if fingerprint is None:
        return Look({}, nothing="Name the change's fingerprint, as the refused start does.")
    row = stores.topology(choice.topology)
    refused = starts.refused_change(stores, row, fingerprint)
    return Look(
        {"incarnation": row.incarnation, "fingerprint": fingerprint, "refused": refused},
        command=f"stormproof ledger accept-change {quoted(choice.topology)} {fingerprint}",
    )


def _accept(stores: Stores, choice: Choice, look: Look, given: Given) -> Done:
    done = starts.accept_change(stores, choice.topology, look.facts["fingerprint"], by=given.by, why=given.why)
    return Done(tuple(done.lines()))


def _look_loss(stores: Stores, choice: Choice) -> Look:
    found = losses.open_losses(stores, choice.topology)
    return Look(
        {"fingerprint": found.fingerprint},
        len(found.records),
        "record",
        said=found.records,
        nothing=None if found.records else found.lines()[0],
        command=f"stormproof ledger accept-loss {quoted(choice.topology)} {found.fingerprint}",
    )


def _accept_loss(stores: Stores, choice: Choice, look: Look, given: Given) -> Done:
    done = losses.accept_loss(stores, choice.topology, look.facts["fingerprint"], by=given.by, why=given.why)
    return Done(tuple(done.lines()))


ACTIONS: Final = (
    Action(
        "adopt",
        "Adopt another incarnation's rows",
        "Adopt",
        _look_adopt,
        _adopt,
        (Field("incarnation", "Incarnation", hint="INCARNATION or NAME/INCARNATION", required=True),),
        warning="The topology may then write beside rows that another life, or another topology, wrote.",
        about="For a table with rows of a lost ledger or of another topology; those rows stay as they are.",
    ),
    Action(
        "accept-change",
        "Accept a changed graph",
        "Accept",
        _look_accept,
        _accept,
        (Field("fingerprint", "Fingerprint", required=True),),
        warning="What the tables hold stays as it is, under other columns, keys or folds than before.",
        about="The topology may start although its sinks are given other columns, keys or folds than before.",
    ),
    Action(
        "accept-loss",
        "Accept what a server lost",
        "Accept",
        _look_loss,
        _accept_loss,
        warning="Messages that were never read stay lost, and the verdict says clean where all else is.",
        about="What a source's server removed before it was read, or where that cannot be told.",
    ),
)
