"""`queue import`: a topology from a source into a queue, run to its end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from stormproof.core.guarantee import Guarantee
from stormproof.core.settings import Settings
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.trident.cli.loading import load_source
from stormproof.trident.cli.output import emit, finish, say
from stormproof.trident.cli.run import drive, ends_with, engine_named, rehearse
from stormproof.trident.cli.run_text import run_text
from stormproof.trident.cli.stores import opened
from stormproof.trident.queue_import import import_topology
from stormproof.trident.wording import counted


def import_messages(
    queue: str,
    target: str,
    parameters: Sequence[str],
    *,
    name: str | None,
    follow: bool,
    engine: str,
    dry_run: bool,
    as_json: bool,
    **chosen: int | None,
) -> None:
    """Import the messages of the source that `target` names; with `follow` until a signal stops it."""
    choice = engine_named(engine)
    settings = Settings(**{setting: value for setting, value in chosen.items() if value is not None})
    source, module = load_source(target, parameters)
    topology = import_topology(queue, source, name)
    if dry_run:
        rehearse(topology, Guarantee.EXACTLY_ONCE, settings, as_json=as_json)
    with opened(makes=True) as stores, closing(PostgresQueue(queue, database=stores.database)) as into:
        into.make_ready()
        statistics = drive(
            topology,
            module,
            Guarantee.EXACTLY_ONCE,
            settings,
            choice,
            until_idle=not follow,
            on_batch=lambda _: into.make_ready(),
        )
    report = {
        "queue": queue,
        "source": source.name,
        "topology": topology.name,
        "messages": statistics.messages,
        "dead_letters": statistics.dead_letters,
        "rejected": statistics.rejected,
        "stopped": statistics.stopped,
    }

    def text() -> None:
        say(run_text(statistics))
        say(f"{counted(statistics.messages, 'message')} of {source.name} put into queue {queue}")

    emit(report, as_json=as_json, text=text)
    finish(ends_with(statistics))
