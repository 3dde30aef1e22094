"""The commands and their options. Each command imports the module that does its work, for `--help` must be quick."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from stormproof.core.postgres.role import RoleKind
from stormproof.trident.cli import subcommands
from stormproof.trident.cli.options import AsJson, Conf, MaxMessages, Params, Target, add_decisions, does, gone
from stormproof.trident.cli.output import guarded

_ClickException: Final = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")


class GuardedGroup(TyperGroup):
    """Shows a command's errors before Typer does, which ends without a word at any broken pipe, even a database's."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command. Wrong options, and a command's own exit, are Typer's to show."""
        arguments: list[str] = sys.argv[1:] if ctx.obj is None else ctx.obj
        with guarded(as_json="--json" in arguments, passing=(_ClickException, typer.Exit, typer.Abort)):
            return super().invoke(ctx)


app = typer.Typer(
    cls=GuardedGroup,
    name="stormproof",
    help="Pipelines on Spark with Storm's guarantees: every message tracked, replayed when it fails, applied once.",
    epilog="Exit status: 0 done; 1 a violation, or a failure; 2 wrong usage; 3 fenced: another driver took over; 4 cannot "
    "tell: the evidence is gone; 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(subcommands.queue_app, name="queue")
app.add_typer(subcommands.audit_app, name="audit")
app.add_typer(subcommands.letters_app, name="dead-letters")
app.add_typer(subcommands.ledger_app, name="ledger")


def _say_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"stormproof {version('stormproof')}")
        raise typer.Exit


@app.callback(help=app.info.help)
def options(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_say_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Options of the program itself."""


@app.command()
@does("run.run_topology")
def run(
    target: Target,
    *,
    guarantee: Annotated[
        str | None, typer.Option(help="exactly-once, at-least-once or at-most-once; overrides the topology's own.")
    ] = None,
    until_idle: Annotated[bool, typer.Option("--until-idle", help="End once the source is empty.")] = False,
    param: Params = None,
    batch_messages: MaxMessages = None,
    batch_bytes: Annotated[
        int | None, typer.Option("--max-bytes", min=1, help="Most bytes of payload in one batch.")
    ] = None,
    poll_interval_s: Annotated[
        float | None, typer.Option("--interval", min=0.001, help="Seconds between two polls of an empty source.")
    ] = None,
    max_batches_in_flight: Annotated[
        int | None,
        typer.Option(
            "--in-flight", min=1, help="Most batches in flight at a time. Default: 1; with --latency-target: 4."
        ),
    ] = None,
    latency_target_s: Annotated[
        float | None,
        typer.Option(
            "--latency-target",
            min=0.001,
            help="Tune batch size and batches in flight, up to these limits, to commit within so many seconds.",
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="spark; or inline, in this process, for trials.")] = "spark",
    conf: Conf = None,
    max_batches: Annotated[int | None, typer.Option(min=1, help="End after this many batches.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show what a start and its first batch would do, and do nothing."),
    ] = False,
    accept_change: Annotated[
        str | None,
        typer.Option(
            metavar="FINGERPRINT",
            help="Accept this change of the topology, by the fingerprint of a dry run or a refused start.",
        ),
    ] = None,
    log_format: Annotated[
        str | None,
        typer.Option(help="text, the default: a short line per batch; json: one object per line."),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Serve metrics to Prometheus on this port of metrics_host; 0: a free port, which is printed.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a topology, batch by batch, until it is idle or stopped.

    Exit status: 0 if it ended by itself, 1 after an error, 2 for wrong usage, 3 if another driver took over, 130 if a signal
    stopped it. With --dry-run: 0 if it would commit or wait, 1 if it would be refused, 4 if it cannot tell.
    Example: stormproof run mine.py:words --param lake=lake --until-idle
    """


@app.command()
@does("explain.explain_topology")
def explain(
    target: Target,
    *,
    param: Params = None,
    guarantee: Annotated[str | None, typer.Option(help="The guarantee; default: the topology's own.")] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw it, as .dot for Graphviz.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a topology compiles to: stages, tasks, exchanges, fused operators, sinks. Runs nothing."""


@app.command()
@does("reports.show_status")
def status(
    topology: Annotated[
        str | None, typer.Argument(metavar="TOPOLOGY", help="This one in detail. Default: all.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show each topology's driver, backlog, sinks and blocked txids; or one topology in detail.

    With TOPOLOGY the exit status is 1 if it has a problem (a blocked txid, a refused start, a driver that is gone or silent,
    an open loss), else 0. Example: stormproof status orders --json
    """


@app.command()
@does("web.serve_page")
def web(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free port.")] = 8420,
    read_only: Annotated[bool, typer.Option("--read-only", help="Nobody may decide, or see payloads.")] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A further host name of the page; may be repeated."),
    ] = None,
    user_header: Annotated[
        str | None,
        typer.Option(metavar="HEADER", help="The header in which a proxy names the user, in place of the token."),
    ] = None,
    proxy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ADDRESS", help="Address or network of the proxy whose header is trusted; may be repeated."
        ),
    ] = None,
    operator: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A user who may decide; others may look; may be repeated.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve the web page: topologies, batches, messages, failures and decisions.

    Prints an address with a one-time token; after its use, another one. Needs the extra `web`.
    Example: stormproof web --port 8420 --read-only
    """


@app.command()
@does("metrics.export")
def metrics(
    topologies: Annotated[
        list[str] | None, typer.Argument(metavar="[TOPOLOGY...]", help="Only these. Default: all.")
    ] = None,
    *,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Replace this file atomically instead of printing.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the ledger's metrics of each topology, in Prometheus' text format. Needs no running driver.

    Run it every minute, with --file in the folder of node exporter's textfile collector, for alerts that a driver is gone,
    silent or blocked. Example: stormproof metrics --file /metrics/stormproof.prom
    """


add_decisions(app)
gone(app, "rejects", "dead-letters")
gone(app, "db", "psql --url")


@app.command()
@does("doctor.examine")
def doctor(
    spark: Annotated[
        bool, typer.Option("--spark/--no-spark", help="Whether to start Spark, which takes some seconds.")
    ] = True,
    kind: Annotated[
        RoleKind,
        typer.Option(
            "--for",
            metavar="KIND",
            help="Check the database role as a producer, driver or auditor.",
            case_sensitive=False,
        ),
    ] = RoleKind.DRIVER,
    cluster: Annotated[bool, typer.Option("--cluster", help="Check each of Spark's executors, too.")] = False,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Check all that a run needs, and how to get what is missing; exit status 1 if a check fails.

    With --cluster a small job checks every executor of the configured master: Python, packages, connections to Postgres, the
    staging folder and the driver, and the clock. Example: stormproof doctor --cluster --conf spark.executor.memory=2g
    """


@app.command()
@does("init.write_project")
def init(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder; created if missing.")],
    as_json: AsJson = False,
) -> None:
    """Write a first topology, its test, settings and a systemd unit into a folder. Overwrites nothing."""


@app.command()
@does("pack.fetch_jars")
def jars(
    folder: Annotated[
        str | None,
        typer.Argument(metavar="FOLDER", help="Default: the setting delta_jars_dir, else ~/.cache/stormproof."),
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Download Delta's jars, unless they are there and intact; exit status 1 if that fails."""


@app.command()
@does("pack.make_archive")
def pack(
    *,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="The archive. Default: in this folder, named by the version.")
    ] = None,
    environment: Annotated[
        bool, typer.Option("--environment", help="Include all packages that tasks need, for spark.archives.")
    ] = False,
    python: Annotated[
        str | None,
        typer.Option(metavar="PROGRAM", help="The executors' Python. Default: this one's version, on their PATH."),
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="PACKAGE", help="A further installed package to include; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Pack this package for a cluster's executors, and print what to pass to Spark.

    Without --environment it is a zip of this package alone, for executors that have its dependencies. The archive is written
    only if a bare interpreter can import from it, and it is reproducible. Example: stormproof pack --environment
    """


@app.command()
@does("psql.open_psql")
def psql(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS...]", help="Arguments for psql.")
    ] = None,
    *,
    command: Annotated[
        list[str] | None,
        typer.Option("-c", "--command", metavar="SQL", help="Run this SQL, without the program psql; may be repeated."),
    ] = None,
    url: Annotated[bool, typer.Option("--url", help="Only print the database's URL, for another client.")] = False,
    show_password: Annotated[bool, typer.Option("--show-password", help="With --url: show its secrets.")] = False,
    as_json: AsJson = False,
) -> None:
    """Open psql on the configured database, or run SQL. An embedded Postgres runs meanwhile."""
