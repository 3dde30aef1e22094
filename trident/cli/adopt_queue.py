"""`queue adopt`: a queue's numbering is taken over by the server that it is in now."""

from __future__ import annotations

from stormproof.core.message import storable_text
from stormproof.trident.audit import opener_for
from stormproof.trident.cli.output import Exit, emit, finish, say
from stormproof.trident.cli.repair import the_ledger
from stormproof.trident.cli.stores import opened, operator
from stormproof.trident.queue_adoption import QueueAdoption, adopt_queue, texts


def adopt(queue: str, *, accept_unproven: bool, by: str, why: str, as_json: bool) -> None:
    """Prove, adopt, and say both; status 4 where something is not proven and was not accepted."""
    with opened() as stores:
        found = adopt_queue(
            queue,
            stores.database,
            the_ledger(stores),
            stores.audit,
            opener_for(stores.database),
            by=by or operator(),
            why=storable_text(why),
            accept_unproven=accept_unproven,
        )
    emit(found, as_json=as_json, text=lambda: _text(found))
    finish(Exit.DONE if found.adopted else Exit.CANNOT_TELL)


def _text(found: QueueAdoption) -> None:
    for line in texts(found):
        say(line)
