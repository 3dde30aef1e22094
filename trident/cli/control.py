"""`pause`, `resume`, `drain` and `stop`: what was asked of a driver, and whether it heard."""

from __future__ import annotations

from stormproof.trident.cli.output import Exit, emit, finish, note, say
from stormproof.trident.cli.stores import opened
from stormproof.trident.decisions.driver import answer_of, ask_driver
from stormproof.trident.transaction_states import OperatorAction


def ask(topology: str, action: OperatorAction, *, by: str, why: str, wait_s: float | None, as_json: bool) -> None:
    """Ask, and print the answer; status 4 if the driver does not answer, 1 if it did not do as asked in `wait_s`."""
    with opened() as stores:
        asked = ask_driver(stores, topology, action, by=by, why=why, wait_s=wait_s, told=note)
    emit(asked, as_json=as_json, text=lambda: say(answer_of(asked)))
    if asked.is_unanswered:
        finish(Exit.CANNOT_TELL)
    finish(Exit.DONE if asked.done or wait_s is None else Exit.FAILED)
