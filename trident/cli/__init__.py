"""The command line. Only what a command needs is imported, when it runs: `--help` must not wait for Spark."""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script `stormproof`; ends the process with the command's exit status."""
    from stormproof.trident.cli.app import app
    from stormproof.trident.cli.output import guarded

    chosen = list(sys.argv[1:] if arguments is None else arguments)
    with guarded(as_json="--json" in chosen):
        app(chosen, prog_name="stormproof")


__all__ = ["main"]
