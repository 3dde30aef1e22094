"""The commands and their options. Each command imports the module that does its work, for `--help` must be quick."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from stormproof.core.postgres.role import RoleKind
from stormproof.trident.cli import audit_app, ledger_app, letters_app, queue_app
from stormproof.trident.cli.decided import add_decisions
from stormproof.trident.cli.made import gone
from stormproof.trident.cli.options import AsJson, By, Conf, TopologyName, Why
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
db_app = typer.Typer(help="The database that the settings name.", no_args_is_help=True)
app.add_typer(queue_app.app, name="queue")
app.add_typer(db_app, name="db")
app.add_typer(audit_app.app, name="audit")
app.add_typer(letters_app.app, name="dead-letters")
app.add_typer(ledger_app.app, name="ledger")


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
def run(
    target: Annotated[str, typer.Argument(metavar="FILE.py:NAME", help="A Topology, or a function that returns one.")],
    *,
    guarantee: Annotated[
        str | None, typer.Option(help="exactly-once, at-least-once or at-most-once; overrides the topology's own.")
    ] = None,
    until_idle: Annotated[bool, typer.Option("--until-idle", help="End once nothing is left to read.")] = False,
    param: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="An argument of the function.")] = None,
    max_messages: Annotated[int | None, typer.Option(min=1, help="Most messages in one batch.")] = None,
    max_bytes: Annotated[int | None, typer.Option(min=1, help="Most bytes of payload in one batch.")] = None,
    interval: Annotated[
        float | None, typer.Option(min=0.001, help="Seconds before an empty source is asked again.")
    ] = None,
    in_flight: Annotated[
        int | None,
        typer.Option(
            min=1, help="Most batches in flight: later ones run while the lowest commits. Default: 1, with a target 4."
        ),
    ] = None,
    latency_target: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Tune size and number of batches, within these limits, to commit this many seconds after the open.",
        ),
    ] = None,
    engine: Annotated[str, typer.Option(help="spark, or inline: in this process, for trying things out.")] = "spark",
    conf: Conf = None,
    max_batches: Annotated[int | None, typer.Option(min=1, help="End after this many batches.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what a start and its first batch would do, in this process; do nothing."),
    ] = False,
    accept_change: Annotated[
        str | None,
        typer.Option(
            metavar="FINGERPRINT", help="Take this change of the topology, as a dry run or a refused start shows it."
        ),
    ] = None,
    log_format: Annotated[
        str | None,
        typer.Option(help="text: a short line a batch; json: one object a line; default: auto, by the terminal."),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Serve metrics to Prometheus at this port of metrics_host; 0: a free one, printed."
        ),
    ] = None,
    metrics_file: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Keep the metrics in this file, for node exporter's textfile collector."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a topology: from its source to its sinks, batch by batch, until idle or stopped.

    Exit status: 0 if it ended by itself, 130 if a signal stopped it, 3 if another driver took over, 1 after an error, 2 if
    it cannot start as it is called. With --dry-run: 0 if it would commit or wait, 1 if it would be refused, 4 if that cannot
    be told. Example: stormproof run mine.py:words --param lake=lake --until-idle
    """
    from stormproof.trident.cli.run import run_topology

    run_topology(
        target,
        param or (),
        guarantee=guarantee,
        engine=engine,
        conf=conf or (),
        until_idle=until_idle,
        max_batches=max_batches,
        dry_run=dry_run,
        accept_change=accept_change,
        as_json=as_json,
        batch_messages=max_messages,
        batch_bytes=max_bytes,
        poll_interval_s=interval,
        max_batches_in_flight=in_flight,
        latency_target_s=latency_target,
        log_format=log_format,
        metrics_port=metrics_port,
        metrics_file=metrics_file,
    )


@app.command()
def explain(
    target: Annotated[str, typer.Argument(metavar="FILE.py:NAME", help="A Topology, or a function that returns one.")],
    *,
    param: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="An argument of the function.")] = None,
    guarantee: Annotated[str | None, typer.Option(help="The guarantee; default: the topology's own.")] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE", help="Draw it as .svg, or as .dot for Graphviz.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show what a topology compiles to: stages, tasks, exchanges, what is fused, sinks. Runs nothing."""
    from stormproof.trident.cli.explain import explain_topology

    explain_topology(target, param or (), guarantee=guarantee, plot=plot, as_json=as_json)


@app.command()
def status(
    topology: Annotated[str | None, typer.Argument(metavar="TOPOLOGY", help="One in detail; default: all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show each topology's driver, backlog, sinks and blocked txids; or one in detail, with an exit status for monitoring.

    With TOPOLOGY the exit status is 1 if something keeps it from going on (a blocked txid, a refused start, a driver that
    is gone), else 0. Example: stormproof status orders --json
    """
    from stormproof.trident.cli.reports import show_status

    show_status(topology, as_json=as_json)


@app.command()
def web(
    *,
    host: Annotated[str, typer.Option(help="Address to listen on; default: this machine alone.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0: a free one.")] = 8420,
    read_only: Annotated[bool, typer.Option("--read-only", help="Nobody may decide, or look at payloads.")] = False,
    allow_host: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="A further name under which browsers reach the page; may be repeated."),
    ] = None,
    user_header: Annotated[
        str | None,
        typer.Option(metavar="HEADER", help="A proxy in front names the user in this header, in place of the token."),
    ] = None,
    proxy: Annotated[
        list[str] | None,
        typer.Option(metavar="ADDRESS", help="From where the header is believed; an address, or a network."),
    ] = None,
    operator: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="A user of the header who may decide; others may look.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Serve the page: every topology, its batches, messages, failures and decisions, in a browser.

    It prints an address with a token that works once, and another one when that was used. Needs the extra web of the
    package. Example: stormproof web --port 8420 --read-only
    """
    from stormproof.trident.cli.web import serve_page

    serve_page(
        host=host,
        port=port,
        read_only=read_only,
        allow_hosts=allow_host or (),
        user_header=user_header,
        proxies=proxy or (),
        operators=operator or (),
        as_json=as_json,
    )


@app.command()
def metrics(
    topologies: Annotated[
        list[str] | None, typer.Argument(metavar="[TOPOLOGY...]", help="These alone; default: all of them.")
    ] = None,
    *,
    file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Write to this file, in one step, in place of printing.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print what the ledger says of each topology, in Prometheus' text format. It needs no running driver.

    For alerts that must not depend on a driver: that it is gone, or silent, or blocked. Run it every minute, with --file
    into the folder of node exporter's textfile collector. Example: stormproof metrics --file /metrics/stormproof.prom
    """
    from stormproof.trident.cli.metrics import export

    export(topologies or (), file=file, as_json=as_json)


add_decisions(app)
gone(app, "rejects", "dead-letters")


@app.command()
def compact(
    topology: TopologyName,
    sink: Annotated[
        str | None, typer.Argument(metavar="SINK", help="One sink's table; default: every Delta table.")
    ] = None,
    *,
    target_mib: Annotated[
        int | None,
        typer.Option(
            min=1, help="Files below this size become files of this size. Default: the table's own, else 100."
        ),
    ] = None,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Write the rows of a Delta sink's many small files into few large ones; no row changes. The driver may run meanwhile.

    The old files stay until a VACUUM removes them. Exit status: 0 if all tables were compacted or had nothing to do, 1 if
    one of them was not, and is as it was. Example: stormproof compact orders
    """
    from stormproof.trident.cli.upkeep import compact_tables

    compact_tables(topology, sink, target_mib=target_mib, by=by, why=why, as_json=as_json)


@app.command()
def vacuum(
    topology: TopologyName,
    sink: Annotated[
        str | None, typer.Argument(metavar="SINK", help="One sink's table; default: every Delta table.")
    ] = None,
    *,
    retain_hours: Annotated[
        int | None,
        typer.Option(min=1, help="Keep what the table let go of since. Default: the table's own, else a week."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Name the files, and remove none.")] = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Remove the files that a Delta sink's table no longer needs: those of versions from before a compaction or a MERGE.

    No prepared file goes, and the driver may run meanwhile. Versions older than the retention can no longer be read. Exit
    status: 0 if all tables were vacuumed, 1 if one of them was not. Example: stormproof vacuum orders --dry-run
    """
    from stormproof.trident.cli.upkeep import vacuum_tables

    vacuum_tables(topology, sink, retained_hours=retain_hours, dry_run=dry_run, by=by, why=why, as_json=as_json)


@app.command()
def repair(
    name: Annotated[
        str,
        typer.Argument(metavar="TABLE-OR-TOPOLOGY", help="A topology's name, or a sink's table as `status` shows it."),
    ],
    sink: Annotated[
        str | None, typer.Argument(metavar="SINK", help="One sink's table; default: every Delta table.")
    ] = None,
    *,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what is wrong, and change nothing.")] = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Mend a Delta sink's table: statistics of files that exclude rows of theirs, and keys that are there more than once.

    Readers with a filter, and merges, pass over a file by its statistics. delta-rs wrote wrong ones for decimals of more
    than 15 digits, so rows were not found, and keys doubled. `audit verify --deep` names such tables. Every file is read.
    Of an upsert's doubled key the newest row by order_by stays; a fold's rows are merged where the log tells that this is
    exact; else they are named and left. It is one version of the table; the driver may run meanwhile. Exit status: 0 if
    nothing is wrong any more, or with --dry-run in any case; 1 if a table was not mended, and is as it was; 4 if something
    was left. Example: stormproof repair invoices --by ann
    """
    from stormproof.trident.cli.upkeep import repair_tables

    repair_tables(name, sink, dry_run=dry_run, by=by, why=why, as_json=as_json)


@app.command()
def doctor(
    spark: Annotated[bool, typer.Option("--spark/--no-spark", help="Also start Spark (some seconds).")] = True,
    kind: Annotated[
        RoleKind,
        typer.Option(
            "--for",
            metavar="KIND",
            help="What the database's role must be able to do: producer, driver or auditor.",
            case_sensitive=False,
        ),
    ] = RoleKind.DRIVER,
    cluster: Annotated[
        bool, typer.Option("--cluster", help="Also ask each of Spark's executors what its tasks need.")
    ] = False,
    conf: Conf = None,
    as_json: AsJson = False,
) -> None:
    """Check all that a run needs, and say what to do about what is missing; exit status 1 if a check fails.

    With --cluster a small job asks every executor of the master that the settings name: whether it imports this version of
    the package and what that needs, and reaches Postgres, the staging folder and the driver; and what its clock says.
    Example: stormproof doctor --cluster --conf spark.executor.memory=2g
    """
    from stormproof.trident.cli.doctor import examine

    examine(spark=spark, cluster=cluster, conf=conf or (), kind=kind, as_json=as_json)


@app.command()
def init(
    folder: Annotated[str, typer.Argument(metavar="DIR", help="The folder; created if it is missing.")],
    as_json: AsJson = False,
) -> None:
    """Write a first topology, its test, its settings and a systemd unit into a folder; overwrites nothing."""
    from stormproof.trident.cli.init import write_project

    write_project(folder, as_json=as_json)


@app.command()
def jars(
    folder: Annotated[
        str | None, typer.Argument(metavar="FOLDER", help="Default: delta_jars_dir, else this user's own folder.")
    ] = None,
    *,
    as_json: AsJson = False,
) -> None:
    """Fetch Delta's jars, unless they are there and whole; exit status 1 if they cannot be fetched."""
    from stormproof.trident.cli.jars import fetch_jars

    fetch_jars(folder, as_json=as_json)


@app.command()
def pack(
    *,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", help="The archive; default: one in this folder, named by the version.")
    ] = None,
    environment: Annotated[
        bool, typer.Option("--environment", help="With all packages that tasks need, for spark.archives.")
    ] = False,
    python: Annotated[
        str | None,
        typer.Option(
            metavar="PROGRAM", help="The executors' own Python; default: by this one's version, on their PATH."
        ),
    ] = None,
    more: Annotated[
        list[str] | None,
        typer.Option("--with", metavar="PACKAGE", help="A further package that is installed here; may be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Make the archive that carries this package to a cluster's executors, and say what to pass to Spark.

    Without --environment it is a zip of this package alone, for executors that have its dependencies. It is written only if
    a bare interpreter imports from it, and from the same files come the same bytes. Example: stormproof pack --environment
    """
    from stormproof.trident.cli.pack import make_archive

    make_archive(output, environment=environment, python=python, more=more or (), as_json=as_json)


@app.command()
def psql(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[-- ARGUMENTS...]", help="For the program psql.")
    ] = None,
    *,
    command: Annotated[
        list[str] | None, typer.Option("-c", "--command", metavar="SQL", help="Run this, without the program psql.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Open psql on the database that the settings name, or run SQL; an embedded Postgres runs meanwhile."""
    from stormproof.trident.cli.psql import open_psql

    open_psql(command or [], arguments or [], as_json=as_json)


@db_app.command("url")
def db_url(
    *,
    show_password: Annotated[bool, typer.Option("--show-password", help="Show secrets, too.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print the database's URL. The embedded Postgres runs only while a Stormproof program uses it."""
    from stormproof.trident.cli.psql import show_url

    show_url(show_password=show_password, as_json=as_json)
