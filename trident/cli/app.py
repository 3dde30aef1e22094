"""The commands and their options. Each command imports the module that does its work, for `--help` must be quick."""

from __future__ import annotations

import sys
from typing import Annotated, Any, Final

import typer
from typer.core import TyperGroup

from stormproof.core.postgres.role import RoleKind
from stormproof.trident.cli import audit_app, control_app, letters_app, rejects_app
from stormproof.trident.cli.options import AsJson, By, QueueName, SinkName, TopologyName, Txid, Why
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
    add_completion=False,
)
queue_app = typer.Typer(help="Put messages into a queue, and look at it.", no_args_is_help=True)
ledger_app = typer.Typer(
    help="The ledger: its schema, its size, and what a person decides about a topology.", no_args_is_help=True
)
db_app = typer.Typer(help="The database that the settings name.", no_args_is_help=True)
app.add_typer(queue_app, name="queue")
app.add_typer(db_app, name="db")
app.add_typer(audit_app.app, name="audit")
app.add_typer(letters_app.app, name="dead-letters")
app.add_typer(rejects_app.app, name="rejects")
app.add_typer(ledger_app, name="ledger")


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
    conf: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="A setting of Spark's own, as spark.executor.memory=4g; may be repeated."
        ),
    ] = None,
    max_batches: Annotated[int | None, typer.Option(min=1, help="End after this many batches.")] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Say what a start and its first batch would do, in this process; do nothing."),
    ] = False,
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


@app.command()
def retry(
    topology: TopologyName,
    txid: Txid,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Let a blocked txid be tried again, once its cause is repaired; the topology's next start commits it.

    Example: stormproof retry orders 17 --why "the disk has room again"
    """
    from stormproof.trident.cli.operate import retry_txid

    retry_txid(topology, txid, by=by, why=why, as_json=as_json)


for _command in (control_app.pause, control_app.resume, control_app.drain, control_app.stop):
    app.command()(_command)


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
    as_json: AsJson = False,
) -> None:
    """Check all that a run needs, and say what to do about what is missing; exit status 1 if a check fails."""
    from stormproof.trident.cli.doctor import examine

    examine(spark=spark, kind=kind, as_json=as_json)


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


@queue_app.command("put")
def queue_put(
    queue: QueueName,
    lines: Annotated[str, typer.Option("--lines", metavar="FILE", help="One message a line; - is standard input.")],
    as_json: AsJson = False,
) -> None:
    """Put a file's lines into a queue, all of them or none; the queue is created if it is missing.

    Example: stormproof queue put lines --lines words.txt
    """
    from stormproof.trident.cli.queue import put_lines

    put_lines(queue, lines, as_json=as_json)


@queue_app.command("import")
def queue_import(
    queue: QueueName,
    source: Annotated[
        str,
        typer.Argument(metavar="FILE.py:NAME", help="A source such as KafkaSource, or a function that returns one."),
    ],
    *,
    param: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="An argument of the function.")] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the import in the ledger; default: made of the source's and the queue's."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on with what arrives later, until stopped.")] = False,
    engine: Annotated[str, typer.Option(help="inline: in this process; or spark.")] = "inline",
    max_messages: Annotated[int | None, typer.Option(min=1, help="Most messages in one batch.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what the first batch would do; do nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Move what lies in a broker, or in another queue, into a queue: each message once, whatever dies meanwhile.

    The source has schema='payload binary': payloads are carried byte by byte. Called again, it goes on where it was; the
    ledger knows it as a topology, under its name. Exit status: as of run. Example: stormproof queue import jobs
    sources.py:rabbit
    """
    from stormproof.trident.cli.queue_import import import_messages

    import_messages(
        queue,
        source,
        param or (),
        name=name,
        follow=follow,
        engine=engine,
        dry_run=dry_run,
        as_json=as_json,
        batch_messages=max_messages,
    )


@queue_app.command("peek")
def queue_peek(
    queue: QueueName,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many messages.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show the first messages in a queue's table; opens nothing."""
    from stormproof.trident.cli.queue import peek

    peek(queue, count, as_json=as_json)


@queue_app.command("stats")
def queue_stats(queue: QueueName, as_json: AsJson = False) -> None:
    """Show how much is in a queue, and how far each of its readers has come."""
    from stormproof.trident.cli.queue import stats

    stats(queue, as_json=as_json)


@queue_app.command("list")
def queue_list(as_json: AsJson = False) -> None:
    """Show every queue: its messages, its size, and how far each of its readers has come."""
    from stormproof.trident.cli.queue import list_queues

    list_queues(as_json=as_json)


@queue_app.command("adopt")
def queue_adopt(
    queue: QueueName,
    accept_unproven: Annotated[
        bool,
        typer.Option("--accept-unproven", help="Adopt even if something is not proven; needs --why, and is recorded."),
    ] = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Take a queue over to this server, after a dump and restore, a fail-over to a standby, or pg_upgrade.

    Compares ledger, sinks and queue first. Status 0: adopted, or nothing to adopt. Status 4: something is not proven; each
    is named, and nothing was changed.
    """
    from stormproof.trident.cli.queue import adopt

    adopt(queue, accept_unproven=accept_unproven, by=by, why=why, as_json=as_json)


@ledger_app.command("migrate")
def ledger_migrate(as_json: AsJson = False) -> None:
    """Bring the database's schema to the version that this program needs."""
    from stormproof.trident.cli.schema import migrate_schema

    migrate_schema(as_json=as_json)


@ledger_app.command("check")
def ledger_check(as_json: AsJson = False) -> None:
    """Show the version of the database's schema; exit status 1 if this program needs another one."""
    from stormproof.trident.cli.schema import check_schema

    check_schema(as_json=as_json)


@ledger_app.command("adopt")
def ledger_adopt(
    topology: TopologyName,
    incarnation: Annotated[str, typer.Argument(metavar="[NAME/]INCARNATION", help="As the refused start names it.")],
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Let a topology write to a table with rows of another incarnation: of a lost ledger, or of another topology."""
    from stormproof.trident.cli.operate import adopt_incarnation

    adopt_incarnation(topology, incarnation, by=by, why=why, as_json=as_json)


ledger_app.command("retry", help="Let a blocked txid be tried again; the same as `stormproof retry`.")(retry)


@ledger_app.command("skip")
def ledger_skip(
    topology: TopologyName,
    txid: Txid,
    sink: SinkName,
    rows: Annotated[
        bool, typer.Option("--rows", help="Only the rows that the sink's Postgres table refuses; it gets the others.")
    ] = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Give up the rows of a blocked or prepared txid at one sink: they become rejects, on record.

    The sink goes on from what it holds. The other sinks get the txid at the next start, and its messages are confirmed.
    With --rows the sink gets, at once, every message whose rows its table takes, and only the others are given up.
    """
    from stormproof.trident.cli.skip import skip_rows, skip_sink

    (skip_rows if rows else skip_sink)(topology, txid, sink, by=by, why=why, as_json=as_json)


@ledger_app.command("accept-change")
def ledger_accept_change(
    topology: TopologyName,
    fingerprint: Annotated[str, typer.Argument(metavar="FINGERPRINT", help="As the refused start names it.")],
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Let a topology go on although its sinks are given other columns, keys or folds than before."""
    from stormproof.trident.cli.operate import accept_change

    accept_change(topology, fingerprint, by=by, why=why, as_json=as_json)


@ledger_app.command("release-table")
def ledger_release_table(
    topology: TopologyName,
    sink: SinkName,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Give up a table that a topology has claimed and never wrote to, so that another topology can claim it.

    The next start of this topology claims a table again, and is refused if another topology has it by then.
    """
    from stormproof.trident.cli.sink_tables import release_table

    release_table(topology, sink, by=by, why=why, as_json=as_json)


@ledger_app.command("adopt-table")
def ledger_adopt_table(
    topology: TopologyName,
    sink: SinkName,
    accept_loss: Annotated[
        bool,
        typer.Option(
            "--accept-loss", help="Give up rows of committed txids that are gone; create the table if it is gone."
        ),
    ] = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Make a table that was restored from a dump a sink's own; it must be able to hold what the ledger says.

    If rows are missing, they are named; `--accept-loss` gives them up, on record. Their messages are not handed out again.
    """
    from stormproof.trident.cli.sink_tables import adopt_table

    adopt_table(topology, sink, accept_loss=accept_loss, by=by, why=why, as_json=as_json)


@ledger_app.command("prune")
def ledger_prune(
    topology: Annotated[str | None, typer.Argument(metavar="TOPOLOGY", help="Default: every topology.")] = None,
    older_than: Annotated[str, typer.Option("--older-than", metavar="AGE", help="As in 30d, 12h, 2w.")] = "30d",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Remove old batches from the ledger, but nothing that a sink, a waiting message or an open batch needs.

    Rejects, skips and operators' decisions stay. The audit then begins after the pruned txids, and says so.
    """
    from stormproof.trident.cli.prune import prune_ledger

    prune_ledger(topology, older_than=older_than, dry_run=dry_run, by=by, why=why, as_json=as_json)


@ledger_app.command("sql")
def ledger_sql(
    grants: Annotated[
        str | None, typer.Option("--grants", metavar="ROLE", help="Print the least rights of this role instead.")
    ] = None,
    kind: Annotated[
        RoleKind,
        typer.Option(
            "--for",
            metavar="KIND",
            help="With --grants: what the role is for: producer, driver or auditor.",
            case_sensitive=False,
        ),
    ] = RoleKind.DRIVER,
    driver: Annotated[
        str | None, typer.Option(metavar="ROLE", help="With --grants: the role that makes queues later.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the SQL that `migrate` would run on an empty database, or the GRANT statements for a role. Needs no database."""
    from stormproof.trident.cli.schema import print_grants, print_sql

    if grants is None:
        print_sql(as_json=as_json)
    else:
        print_grants(grants, kind, driver, as_json=as_json)
