"""A topology's driver: pause, resume, drain, stop."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from stormproof.trident.audit.status import driver_state
from stormproof.trident.decisions.driver import answer_of, ask_driver, require_askable
from stormproof.trident.transaction_states import OperatorAction
from stormproof.trident.web.decide.action import Action, Choice, Does, Done, Given, Look, Looks
from stormproof.trident.web.decide.choosing import quoted

if TYPE_CHECKING:
    from stormproof.trident.stores import Stores

_ALREADY: Final = {
    OperatorAction.RESUME: "It is not paused: there is nothing to resume.",
    OperatorAction.STOP: "No driver of it runs: there is nothing to stop.",
}


def _looks(action: OperatorAction) -> Looks:
    def look(stores: Stores, choice: Choice) -> Look:
        row = stores.topology(choice.topology)
        askable = require_askable(stores, choice.topology, action)
        return Look(
            {"driver": f"{row.driver_host}:{row.driver_pid}, {driver_state(row).value}", "run": f"epoch {row.epoch}"},
            nothing=None if askable else _ALREADY[action],
            command=f"stormproof {action.value} {quoted(choice.topology)}",
        )

    return look


def _does(action: OperatorAction) -> Does:
    def do(stores: Stores, choice: Choice, look: Look, given: Given) -> Done:
        del look
        asked = ask_driver(stores, choice.topology, action, by=given.by, why=given.why)
        return Done((answer_of(asked),), ok=not asked.is_unanswered)

    return do


def _action(action: OperatorAction, title: str, about: str) -> Action:
    return Action(action.value, title, title, _looks(action), _does(action), about=about)


ACTIONS: Final = (
    _action(
        OperatorAction.PAUSE,
        "Pause",
        "The driver opens no more batches until it is resumed; those in flight are committed. Later drivers obey, too.",
    ),
    _action(OperatorAction.RESUME, "Resume", "The driver opens batches again."),
    _action(
        OperatorAction.DRAIN,
        "Drain",
        "The driver opens no new messages, and ends once none is pending and none waits for a retry.",
    ),
    _action(OperatorAction.STOP, "Stop", "The driver ends after the batches in flight."),
)
