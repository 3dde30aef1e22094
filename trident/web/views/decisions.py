"""The addresses of decisions: look, confirm, and see what became of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from starlette.datastructures import QueryParams
from starlette.responses import Response

from stormproof.core.base.errors import StormproofError, TransientError, UsageError
from stormproof.trident.decisions.canary import CanaryEnd
from stormproof.trident.declarations.decisions import Decision, DecisionPreview, on_the_page
from stormproof.trident.ledger.database import Confirmation, Confirmed, confirmed
from stormproof.trident.web.people import WebRole
from stormproof.trident.web.proposals import (
    DecisionOutcome,
    DecisionSubject,
    Given,
    Proposal,
    RunningCanary,
    missing_of,
)
from stormproof.trident.web.visit import Route, Visit

if TYPE_CHECKING:
    from stormproof.trident.decisions.stores import Stores

SELECTED_SHOWN: Final = 500
"""Chosen ids that a form repeats; more are chosen by a filter."""


async def decide(visit: Visit) -> Response:
    """Show what a decision would be about, and ask for its confirmation; changes nothing.

    What is shown has an address of its own. So the browser's back button, or a reload, comes to what became of it.
    """
    nonce = visit.text("proposal")
    if nonce is None:
        return await _shown(visit, visit.query)
    proposal = visit.site.proposals.find(nonce, visit.csrf)
    if proposal is None:
        return await _not_known(visit, nonce)
    return _asked(visit, proposal) if proposal.outcome is None else visit.redirect("decided", proposal=nonce)


async def decide_selected(visit: Visit) -> Response:
    """The same for messages that were chosen in a list: there are too many of them for an address."""
    return await _shown(visit, visit.form)


async def confirm(visit: Visit) -> Response:
    """Do it, once: a second click and a reload get the first one's outcome."""
    proposal = visit.site.proposals.find(visit.form.get("proposal", ""), visit.csrf)
    if proposal is None:
        return await _not_known(visit, visit.form.get("proposal", ""))
    assert visit.user is not None
    try:
        given = Given.of(proposal.action, visit.user.name or visit.form.get("by", ""), visit.form)
    except UsageError as error:
        return _asked(visit, proposal, status=400, missing=error.message)
    missing = [*missing_of(proposal.action.given, given.values)]
    if not given.by:
        missing.insert(0, "Who decides")
    if missing and proposal.outcome is None:
        return _asked(visit, proposal, status=400, missing=f"Fill in: {', '.join(missing)}.")
    stores = await _stores(visit)
    await visit.site.reader.call(proposal.once, lambda: act(stores, proposal, given))
    return visit.redirect("decided", proposal=proposal.nonce)


async def decided(visit: Visit) -> Response:
    """What became of a decision."""
    proposal = visit.site.proposals.find(visit.required("proposal"), visit.csrf)
    if proposal is None or proposal.outcome is None:
        return await _not_known(visit, visit.required("proposal"))
    outcome = proposal.outcome
    canary = outcome.canary
    report = None if canary is None else canary.report
    return visit.page(
        "decided.html",
        title=proposal.action.title,
        proposal=proposal,
        action=proposal.action,
        outcome=outcome,
        topology=proposal.choice.topology,
        topology_name=proposal.choice.topology,
        canary=canary,
        again=visit.link("decide", **_names(proposal)),
        report=report,
        ended_well=report is not None and report.end is CanaryEnd.DONE,
    )


async def _not_known(visit: Visit, secret: str) -> Response:
    """A form that another process made, or this one before it was started anew: only the ledger knows what became of it."""
    stores = await _stores(visit)

    def ask() -> Confirmed | None:
        with stores.audit.snapshot() as snapshot:
            return confirmed(snapshot.connection, secret)

    found = await visit.site.reader.call(ask)
    if found is not None:
        why = f"{found}. Its outcome is on record: see what operators decided."
        return visit.page("refused.html", status=409, title=f"Done already: {on_the_page(found.action).title}", why=why)
    again = None if visit.text("action") is None else visit.here(proposal=None)
    why = (
        "What was to be confirmed is not known here: an hour has passed, the page was started anew, another process of it "
        "showed it, or the session is another one. The ledger has no record of a confirmation, so nothing of it was done by "
        "now. Look at it again before you decide."
    )
    return visit.page("refused.html", status=409, title="Nothing was done", why=why, again=again)


async def stop_canary(visit: Visit) -> Response:
    """Have a canary hand out no further wave."""
    proposal = visit.site.proposals.find(visit.form.get("proposal", ""), visit.csrf)
    if proposal is None or proposal.outcome is None or proposal.outcome.canary is None:
        raise UsageError(
            "no such canary runs in this process of the page. Wherever it runs: pause the topology, and it hands out no "
            "further wave"
        )
    proposal.outcome.canary.stop()
    return visit.redirect("decided", proposal=proposal.nonce)


ROUTES: Final = (
    Route("decide", "/decide", decide, role=WebRole.OPERATOR),
    Route("decide_selected", "/decide/selected", decide_selected, role=WebRole.OPERATOR, method="POST"),
    Route("confirm", "/decide/confirm", confirm, role=WebRole.OPERATOR, method="POST"),
    Route("decided", "/decided", decided, role=WebRole.OPERATOR),
    Route("stop_canary", "/decided/stop", stop_canary, role=WebRole.OPERATOR, method="POST"),
)


async def _stores(visit: Visit) -> Stores:
    return await visit.site.reader.call(visit.site.reader.opened)


async def _shown(visit: Visit, params: QueryParams) -> Response:
    action, topology = on_the_page(params.get("action", "")), params.get("topology", "").strip()
    if not topology:
        raise UsageError("the address lacks topology=")
    if any("\0" in value for _, value in params.multi_items()):
        raise UsageError("the address has a NUL character, which no name and no message's id has")
    choice = DecisionSubject.of(action, topology, params)
    stores = await _stores(visit)
    await visit.site.reader.call(stores.topology, topology)  # an unknown one is an error page
    look, refused = await visit.site.reader.call(_look, action, stores, choice)
    if look is None:
        assert refused is not None
        look = DecisionPreview({}, nothing=refused)
    proposal = visit.site.proposals.add(visit.csrf, action, choice, look)
    if look.nothing is not None:
        return _asked(visit, proposal, refused=refused)
    return visit.redirect("decide", **_names(proposal), proposal=proposal.nonce)


def _look(action: Decision, stores: Stores, choice: DecisionSubject) -> tuple[DecisionPreview | None, str | None]:
    """What it is about; or why it cannot be decided now."""
    try:
        return look_at(action, stores, choice), None
    except TransientError:
        raise
    except StormproofError as error:
        return None, error.message


def look_at(action: Decision, stores: Stores, choice: DecisionSubject) -> DecisionPreview:
    """What it would be about now."""
    if choice.missing:
        return DecisionPreview({}, nothing=f"Fill in what it is about: {', '.join(choice.missing)}.")
    return action.looks()(stores, choice.topology, **action.preset, **choice.values)


def _asked(
    visit: Visit, proposal: Proposal, *, status: int = 200, refused: str | None = None, missing: str | None = None
) -> Response:
    choice = proposal.choice
    return visit.page(
        "decide.html",
        status=status,
        title=proposal.action.title,
        proposal=proposal,
        action=proposal.action,
        look=proposal.look,
        refused=refused,
        missing=missing,
        topology=choice.topology,
        topology_name=choice.topology,
        shell=proposal.action.shell(choice.topology, {**choice.values, **proposal.look.fixed}),
        ids=_ids(choice),
        ids_max=SELECTED_SHOWN,
        chosen={field.name: choice.text(field.name) for field in proposal.action.choice},
        filled={**proposal.look.prefilled, **{name: value for name, value in visit.form.items() if missing}},
        asks_who=not (visit.user is not None and visit.user.name),
    )


def _names(proposal: Proposal) -> dict[str, str | None]:
    """What the decision is about, for an address that looks at it again."""
    choice, action, ids = proposal.choice, proposal.action, _ids(proposal.choice)
    about = {"action": action.name, "topology": choice.topology, "id": ids[0] if len(ids) == 1 else None}
    return {**about, **{one.name: choice.text(one.name) for one in action.choice if one.name != "id"}}


def _ids(choice: DecisionSubject) -> tuple[str, ...]:
    """The messages that were chosen one by one."""
    found = choice.values.get("id", ())
    return (found,) if isinstance(found, str) else found


def act(stores: Stores, proposal: Proposal, given: Given) -> DecisionOutcome:
    """Take a decision that was confirmed, if what it is about is still as it was shown."""
    action, choice, shown = proposal.action, proposal.choice, proposal.look
    if shown.nothing is not None:
        return DecisionOutcome((f"Nothing was done. {shown.nothing}",), False, given.by)
    try:
        if shown.facts:
            now = look_at(action, stores, choice)
            changed = _changes(shown, now)
            if changed:
                said = "Nothing was done, since it is no longer what you were shown. Look at it again."
                return DecisionOutcome((said, *changed), False, given.by)
        confirming = replace(stores, confirmation=Confirmation.of(proposal.nonce, action.name, given.by))
        values = {**action.preset, **choice.values, **shown.fixed, **given.values}
        done = action.works()(confirming, choice.topology, **values, by=given.by, why=given.why)
    except StormproofError as error:
        return DecisionOutcome((error.message,), False, given.by)
    run = getattr(done, "canary", None)
    ok = getattr(done, "exit_status", 0) == 0
    return DecisionOutcome(tuple(done.lines()), ok, given.by, None if run is None else RunningCanary(run))


def _changes(shown: DecisionPreview, now: DecisionPreview) -> list[str]:
    """What differs between two looks, for people."""
    if now.nothing is not None:
        return [now.nothing]
    names = dict.fromkeys([*shown.facts, *now.facts])
    found = [
        f"{name}: {shown.facts.get(name, 'none')} when you looked, {now.facts.get(name, 'none')} now"
        for name in names
        if shown.facts.get(name) != now.facts.get(name)
    ]
    if shown.count != now.count:
        found.append(f"{shown.noun}s: {shown.count} when you looked, {now.count} now")
    return found
