"""The command line. Only what a command needs is imported, when it runs: `--help` must not wait for Spark."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """The console script `stormproof`; ends the process with the command's exit status."""
    try:
        from stormproof.trident.cli.output import guarded
    except KeyboardInterrupt:  # Ctrl-C at once, before there is what shows errors
        sys.stderr.write("stormproof: interrupted\n")
        sys.exit(130)

    chosen = list(sys.argv[1:] if arguments is None else arguments)
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison] - started with a closed output, as by >&-
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    with guarded(as_json="--json" in chosen):
        from stormproof.trident.cli.app import app

        app(chosen, prog_name="stormproof", obj=chosen)


__all__ = ["main"]
