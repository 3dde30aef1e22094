"""The commands of `audit`, `dead-letters`, `queue` and `ledger`, and their options.

What a view of the ledger answers, and what chooses among dead letters, is declared once, and made into options here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from stormproof.core.base.clock import SystemClock
from stormproof.core.postgres.role import RoleKind
from stormproof.trident.cli.options import (
    AS_JSON,
    BY,
    WHY,
    AsJson,
    By,
    MaxMessages,
    MessageId,
    Params,
    QueueName,
    TopologyName,
    Txid,
    Why,
    add_decisions,
    command,
    does,
    gone,
    opened,
    parameter,
    taken,
    told_of,
    worker,
)
from stormproof.trident.cli.output import Exit, emit, finish, say, table
from stormproof.trident.declarations.decisions import DECISIONS, LETTERS, Decision
from stormproof.trident.declarations.questions import QUESTIONS, Question
from stormproof.trident.terms.transaction_states import Verdict
from stormproof.trident.terms.wording import counted, parse_time

if TYPE_CHECKING:
    from stormproof.trident.audit.ledger import AuditLedger
    from stormproof.trident.audit.questions import QuestionAnswer, QuestionFilter

LIMIT: Final = 100
_ANY_TOPOLOGY: Final = parameter(
    "topology", str | None, typer.Argument(metavar="TOPOLOGY", help="Only this topology. Default: all."), None
)
_LIMIT: Final = parameter(
    "limit", int, typer.Option("--limit", min=1, help="Most rows to print; how many were left out is said."), LIMIT
)
_TIMES: Final = (
    parameter(
        "since",
        str | None,
        typer.Option("--since", metavar="TIME", help="From this time on: ISO 8601, or an age such as 12h."),
        None,
    ),
    parameter(
        "until",
        str | None,
        typer.Option("--until", metavar="TIME", help="Before this time: ISO 8601, or an age such as 12h."),
        None,
    ),
)


def command_of(question: Question) -> Callable[..., None]:
    """The command that answers a question, with an option for each of its filters."""
    txid = [_filter(question, "txid", question.txid, int)] if question.txid else []
    parameters = [
        *(_ANY_TOPOLOGY, *txid, *(_filter(question, name, name, str) for name in question.filters)),
        *(_TIMES if question.time else ()),
        *(_group(question), _LIMIT, AS_JSON),
    ]
    return command(parameters, question.help, partial(show, question))


def _filter(question: Question, name: str, column: str, kind: type[int | str]) -> inspect.Parameter:
    """An option that filters by a column: what it is, the column's meaning says."""
    meaning = question.columns[column] + ("; or its id at the server" if name == "message" else "")
    option = typer.Option(
        {"error_class": "--class"}.get(name, f"--{name}"),
        metavar={"message": "ID", "error_class": "CLASS"}.get(name),
        min=1 if kind is int else None,
        help=f"Filter: {meaning}.",
    )
    return parameter(name, kind | None, option, None)


def _group(question: Question) -> inspect.Parameter:
    told = f"Count by {', '.join(question.groups[:-1])} or {question.groups[-1]}; may be repeated."
    return parameter("group", list[str] | None, typer.Option("--group", metavar="COLUMN", help=told), None)


def show(question: Question, *, as_json: bool, **asked: Any) -> None:
    """Answer a question, and end with the status that the answer has."""
    whole = _asked(**asked)
    with opened() as stores:
        from stormproof.trident.audit.inspect import opener_for
        from stormproof.trident.audit.questions import ask

        answer = ask(stores.audit, question, whole, opener_for(stores.database))
        status = _status(stores.audit, question, answer)
    emit(answer, as_json=as_json, text=partial(_text, answer))
    finish(status)


def _asked(
    *, since: str | None = None, until: str | None = None, group: Sequence[str] | None, **filters: Any
) -> QuestionFilter:
    """What a command's options ask for."""
    from stormproof.trident.audit.questions import QuestionFilter

    now = SystemClock().now()
    return QuestionFilter(
        **filters, since=parse_time(since, now), until=parse_time(until, now), group=tuple(group or ())
    )


def _status(ledger: AuditLedger, question: Question, answer: QuestionAnswer) -> Exit:
    if question.name == "verdicts":
        return _of_verdicts(ledger, answer.asked.topology)
    return Exit.FAILED if question.fails and any(map(question.is_failed_by, answer.rows)) else Exit.DONE


def _of_verdicts(ledger: AuditLedger, topology: str | None) -> Exit:
    """By the newest verdict of each topology, or of one."""
    from stormproof.trident.audit.report import newest_verdicts

    with ledger.snapshot() as snapshot:
        rows = snapshot.topologies() if topology is None else (snapshot.topology(topology),)
        newest = newest_verdicts(snapshot.connection)
    found = {newest[row.incarnation].verdict if row.incarnation in newest else None for row in rows}
    if Verdict.VIOLATION in found:
        return Exit.FAILED
    return Exit.DONE if found <= {Verdict.CLEAN} else Exit.CANNOT_TELL


def _text(answer: QuestionAnswer) -> None:
    """An answer's rows, for people."""
    from stormproof.trident.audit.questions import columns_of

    names = columns_of(answer.rows)
    if answer.rows:
        heads = [name.replace("_", " ") for name in names]
        table(heads, [[_cell(row[name]) for name in names] for row in answer.rows])
    more = f", {answer.left_out} more left out (--limit)" if answer.left_out else ""
    say(f"{counted(len(answer.rows), 'row')}{more}; the same in SQL: {answer.view}")


def _cell(value: object) -> object:
    match value:
        case dict():
            return ", ".join(f"{name} {number}" for name, number in value.items()) or None
        case list():
            return ", ".join(map(str, value)) or None
        case float():
            return f"{value:.3g}"
        case _:
            return value


audit_app: Final = typer.Typer(help="Questions about what happened, and the check of it.", no_args_is_help=True)

Since = Annotated[
    str | None, typer.Option("--since", metavar="TIME", help="From this time on: ISO 8601, or an age such as 12h.")
]


@audit_app.command()
@does("verify.show_verify")
def verify(
    topology: TopologyName,
    first: Annotated[int, typer.Option(min=1, help="The first txid.")] = 1,
    last: Annotated[int | None, typer.Option(min=1, help="The last txid. Default: the newest.")] = None,
    *,
    since: Annotated[
        str | None,
        typer.Option(
            "--since",
            metavar="POINT",
            help="Check what came since a txid, a time, or `last`: the last clean verdict of the same scope.",
        ),
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Read the sinks' tables, and compare their rows with what was written.")
    ] = False,
    sink: Annotated[
        list[str] | None,
        typer.Option("--sink", help="With --deep: read only this sink's table; may be repeated."),
    ] = None,
    others_write: Annotated[
        bool, typer.Option("--others-write", help="With --deep: allow rows that other writers added.")
    ] = False,
    by: By = "",
    as_json: AsJson = False,
) -> None:
    """Check ledger, sinks and source against each other, and record the verdict with its scope.

    With --deep it also finds rows that others changed, deleted, added or doubled, and committed messages that were altered
    or removed while their source keeps them; it names what it cannot compare.

    Exit status: 0 if all agrees; 1 if there is a violation; 4 if the evidence is gone, or if --deep could not compare all
    rows and messages; the last line says which. Example: stormproof audit verify orders --first 100
    """


@audit_app.command()
@does("reports.show_txn")
def txn(topology: TopologyName, txid: Txid, as_json: AsJson = False) -> None:
    """Show what a txid read, replayed, and wrote to each sink."""


@audit_app.command()
@does("reports.show_components")
def components(topology: TopologyName, *, since: Since = None, as_json: AsJson = False) -> None:
    """Show each component's tuples emitted, acked and failed, its time, and the tuples of each edge.

    Sums over batches; of each, the attempt that was prepared, and --since takes the time of that.
    Example: stormproof audit components orders --since 1h
    """


@audit_app.command()
@does("reports.show_message")
def message(topology: TopologyName, message: MessageId, as_json: AsJson = False) -> None:
    """Show what became of a message: the batches that opened it, its failures, and its state now.

    Example: stormproof audit message orders 753-12
    """


for _one in QUESTIONS.values():
    if _one.order:
        audit_app.command(_one.name)(command_of(_one))


@audit_app.command()
@does("verify.make_report")
def report(
    topology: TopologyName,
    *,
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write; it must not exist.")],
    since: Annotated[
        str | None,
        typer.Option("--since", metavar="TIME", help="Only batches opened from this time on: ISO 8601, or an age."),
    ] = None,
    until: Annotated[
        str | None,
        typer.Option("--until", metavar="TIME", help="Only batches opened before this time: ISO 8601, or an age."),
    ] = None,
    message: Annotated[
        list[str] | None, typer.Option("--message", metavar="ID", help="Add this message's history; may be repeated.")
    ] = None,
    deep: Annotated[
        bool, typer.Option("--deep", help="Compare the rows of the sinks' tables, as audit verify --deep does.")
    ] = False,
    others_write: Annotated[
        bool, typer.Option("--others-write", help="With --deep: allow rows that other writers added.")
    ] = False,
    rows: Annotated[int, typer.Option("--rows", min=1, max=10_000, help="Most rows of each list.")] = 200,
    by: By = "",
    as_json: AsJson = False,
) -> None:
    """Write a report for an auditor: the verdict and the answers to the questions, as JSON with digests.

    It has no payloads and no error texts. Sign it with `ssh-keygen -Y sign -n stormproof-report -f KEY FILE`.
    Exit status: of the verdict, 0 clean, 1 violation, 4 cannot tell.
    Example: stormproof audit report orders --since 30d --out orders.json
    """


letters_app = typer.Typer(
    help="Dead letters: messages that failed too often, and messages whose rows one sink rejected.",
    no_args_is_help=True,
)

# ---- dead-letters

_FILTERS: Final = [taken(one) for one in LETTERS if one.name not in ("id", "all")]
_TOPOLOGY: Final = parameter("topology", str, typer.Argument(metavar="TOPOLOGY", help="The topology's name."))
_IDS: Final = parameter(
    "ids_file",
    str | None,
    typer.Option("--ids", metavar="FILE", help="A file of message ids, one per line; - is standard input."),
    None,
)
_DRY_RUN: Final = parameter("dry_run", bool, typer.Option("--dry-run", help="Only count the messages."), False)
_YES: Final = parameter("yes", bool, typer.Option("--yes", "-y", help="Do not ask."), False)


def _disposes(decision: Decision) -> None:
    options = [_IDS, *map(taken, decision.fields), _DRY_RUN, _YES, BY, WHY, AS_JSON]
    made = command([_TOPOLOGY, *options], told_of(decision), partial(worker("letters.dispose"), verb=decision.name))
    letters_app.command(decision.name)(made)


letters_app.command("list")(
    command(
        [
            *(_ANY_TOPOLOGY, *_FILTERS),
            parameter(
                "decided",
                bool,
                typer.Option("--decided", help="Include those that an operator has decided."),
                False,
            ),
            parameter("count", bool, typer.Option("--count", help="Only count them, by error class."), False),
            parameter(
                "limit",
                int | None,
                typer.Option("--limit", min=1, help="Most to show. Default: 50; with --json: all."),
                None,
            ),
            AS_JSON,
        ],
        "List the dead letters that wait for a decision, with payload and error, and counts by error class.\n\n"
        "No sink holds a message that failed too often; of a rejected message all other sinks hold the rows. A message that "
        "is requeued, edited or dropped leaves the list, and stays on record.\n\n"
        "Example: stormproof dead-letters list orders --sink invoices --error-class 23 --since 2h",
        worker("letters.list_letters"),
    )
)


@letters_app.command("show")
@does("letters.show_letter")
def letters_show(topology: TopologyName, message: MessageId, as_json: AsJson = False) -> None:
    """Show one dead letter: its payload, failures, refused rows, batches and decisions."""


@letters_app.command("edit")
@does("letters.edit_letter")
def letters_edit(
    topology: TopologyName,
    message: MessageId,
    *,
    payload: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="The new payload; - is standard input. Default: open $EDITOR."),
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Keep a newline at the end that the old payload did not have.")
    ] = False,
    by: By = "",
    why: Why = "",
    as_json: AsJson = False,
) -> None:
    """Requeue a dead letter with another payload; the old payload stays on record.

    A rejected message cannot be edited: the other sinks hold it as it is.

    Example: stormproof dead-letters edit orders 753-12 --payload mended.json --why "a comma for a point"
    """


add_decisions(letters_app, "dead-letters")
for _decision in DECISIONS:
    if _decision.name in ("requeue", "drop"):
        _disposes(_decision)


# ---- queue

queue_app = typer.Typer(help="Postgres queues: put messages, import them, look at them.", no_args_is_help=True)


@queue_app.command("put")
@does("queue.put_lines")
def queue_put(
    queue: QueueName,
    lines: Annotated[
        str, typer.Option("--lines", metavar="FILE", help="A file with one message per line; - is standard input.")
    ],
    as_json: AsJson = False,
) -> None:
    """Put a file's lines into a queue, all or none. The queue is created if missing.

    Example: stormproof queue put lines --lines words.txt
    """


@queue_app.command("create")
@does("queue.create")
def queue_create(
    queue: QueueName,
    schema: Annotated[
        str | None,
        typer.Option(metavar="SCHEMA", help="The schema of its messages, as readers declare it; `list` shows it."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create a queue before its first message or reader: for producers in SQL, an outbox, or another role.

    An existing queue is left as it is; a schema other than the recorded one is refused.
    Example: stormproof queue create orders --schema "order_id long, total decimal(10, 2)"
    """


@queue_app.command("import")
@does("queue.import_messages")
def queue_import(
    queue: QueueName,
    source: Annotated[
        str,
        typer.Argument(metavar="FILE.py:NAME", help="A source such as KafkaSource, or a function that returns one."),
    ],
    *,
    param: Params = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the import in the ledger. Default: made of the names of source and queue."),
    ] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Continue with later messages, until stopped.")] = False,
    engine: Annotated[str, typer.Option(help="inline, in this process; or spark.")] = "inline",
    batch_messages: MaxMessages = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show what the first batch would do, and do nothing.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Move the messages of a broker, or of another queue, into a queue, exactly once.

    The source needs schema='payload binary'; payloads are copied byte by byte. Called again, it continues. The ledger has it
    as a topology. Exit status: as of run. Example: stormproof queue import jobs sources.py:rabbit
    """


@queue_app.command("peek")
@does("queue.peek")
def queue_peek(
    queue: QueueName,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many messages.")] = 10,
    as_json: AsJson = False,
) -> None:
    """Show a queue's first messages. Opens nothing."""


@queue_app.command("list")
@does("queue.list_queues")
def queue_list(
    queue: Annotated[str | None, typer.Argument(metavar="QUEUE", help="One in detail; default: all.")] = None,
    as_json: AsJson = False,
) -> None:
    """Show every queue's messages and size, and each reader's position; or one queue in detail, with its readers' names."""


gone(queue_app, "queue stats", "queue list QUEUE")


add_decisions(queue_app, "queue")


# ---- ledger

ledger_app = typer.Typer(help="The ledger: its schema, its size, and decisions about topologies.", no_args_is_help=True)


@ledger_app.command("migrate")
@does("ledger.migrate_schema")
def ledger_migrate(as_json: AsJson = False) -> None:
    """Create the schema of ledger and queues. The schema of another version is refused, and left as it is."""


add_decisions(ledger_app, "ledger")
gone(ledger_app, "ledger check", "doctor --no-spark")
gone(ledger_app, "ledger retry", "retry")


@ledger_app.command("sql")
@does("ledger.print_sql")
def ledger_sql(
    grants: Annotated[
        str | None,
        typer.Option(
            "--grants", metavar="ROLE", help="Print GRANT statements for this role instead: the least that it needs."
        ),
    ] = None,
    kind: Annotated[
        RoleKind,
        typer.Option(
            "--for",
            metavar="KIND",
            help="With --grants: the role is a producer, driver or auditor.",
            case_sensitive=False,
        ),
    ] = RoleKind.DRIVER,
    driver: Annotated[
        str | None, typer.Option(metavar="ROLE", help="With --grants: the role that will create queues.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the SQL that `migrate` runs, or a role's GRANT statements. Needs no database."""
