"""The commands `pause`, `resume`, `drain` and `stop`."""

from __future__ import annotations

from typing import Annotated

import typer

from stormproof.trident.cli.options import AsJson, By, TopologyName, Why

_Wait = Annotated[
    float | None,
    typer.Option(
        min=0, metavar="SECONDS", help="Wait for its effect for so long. Default: until the driver has heard."
    ),
]


def pause(
    topology: TopologyName,
    by: By = "",
    why: Why = "",
    wait: _Wait = None,
    as_json: AsJson = False,
) -> None:
    """Have a topology open no more batches until it is resumed; those in flight are committed. Later drivers obey, too.

    Exit status: 0 if the driver has heard (with --wait: is paused), or none runs; 1 if it is not paused after --wait; 4 if
    it does not answer. Example: stormproof pause orders --why "the warehouse is being repaired" --wait 60
    """
    from stormproof.trident.cli.control import ask
    from stormproof.trident.transaction_states import OperatorAction

    ask(topology, OperatorAction.PAUSE, by=by, why=why, wait_s=wait, as_json=as_json)


def resume(
    topology: TopologyName,
    by: By = "",
    why: Why = "",
    wait: _Wait = None,
    as_json: AsJson = False,
) -> None:
    """Have a paused topology open batches again.

    Exit statuses are those of pause. Example: stormproof resume orders
    """
    from stormproof.trident.cli.control import ask
    from stormproof.trident.transaction_states import OperatorAction

    ask(topology, OperatorAction.RESUME, by=by, why=why, wait_s=wait, as_json=as_json)


def drain(
    topology: TopologyName,
    by: By = "",
    why: Why = "",
    wait: _Wait = None,
    as_json: AsJson = False,
) -> None:
    """Have the driver open no new messages, and end once none is pending and none waits for a retry.

    Do this before a change of the topology: no message is then half done by the old one. Exit status: 0 if the driver has
    heard (with --wait: has ended); 1 if it has not ended after --wait; 2 if none runs; 4 if it does not answer.
    Example: stormproof drain orders --why "version 12" --wait 600
    """
    from stormproof.trident.cli.control import ask
    from stormproof.trident.transaction_states import OperatorAction

    ask(topology, OperatorAction.DRAIN, by=by, why=why, wait_s=wait, as_json=as_json)


def stop(
    topology: TopologyName,
    by: By = "",
    why: Why = "",
    wait: _Wait = None,
    as_json: AsJson = False,
) -> None:
    """Have the driver end after the batches in flight.

    Exit statuses are those of drain, but 0 if no driver runs.

    Example: stormproof stop orders --why "the host is being patched" --wait 60
    """
    from stormproof.trident.cli.control import ask
    from stormproof.trident.transaction_states import OperatorAction

    ask(topology, OperatorAction.STOP, by=by, why=why, wait_s=wait, as_json=as_json)
