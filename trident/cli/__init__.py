"""The command line. Only what a command needs is imported, when it runs: `--help` must not wait for Spark.

| module | commands |
| --- | --- |
| `run`, `logs` | `run`: what it prints and logs |
| `verify` | `audit verify`; `audit report`: the file for an auditor |
| `reports` | `status`; `audit txn`, `components`, `message` |
| `metrics` | `metrics` |
| `letters` | `dead-letters list`, `show`; `edit`, `requeue`, `drop` |
| `web` | `web` |
| `queue` | `queue put`, `create`, `peek`, `list`, `import` |
| `doctor` | `doctor`: what does a run need; what is missing |
| `init`, `explain`, `pack` | `init`, `explain`, `jars` and `pack` |
| `psql` | `psql` |
| `ledger` | `ledger migrate`, `sql`: the schema, and what each role may do |
| `app`, `subcommands`, `options` | all commands and their options; how one is made from a declaration; on which database |
| `output` | JSON, tables, error lines, and the exit status of every command |
| `loading` | how is FILE.py:NAME loaded |
"""

from __future__ import annotations

import os
import signal
import sys
import threading
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
    if threading.current_thread() is threading.main_thread():
        # By default both end the process before it lets go what it holds, such as the embedded Postgres.
        for number, handler in ((signal.SIGTERM, signal.default_int_handler), (signal.SIGHUP, _hung_up)):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, handler)
    with guarded(as_json="--json" in chosen):
        from stormproof.trident.cli.app import app

        app(chosen, prog_name="stormproof", obj=chosen)


def _hung_up(number: int, frame: object) -> None:
    """The terminal was closed: end as at a SIGTERM, for which what runs may have a handler of its own."""
    signal.raise_signal(signal.SIGTERM)


__all__ = ["main"]
