"""The decisions that a person takes, each declared once: its command and its form on the page are made from it.

A decision's work is a function in `trident/decisions`: it gets the stores, the topology (or queue), each field by its name,
`by` and `why`, and returns a report, whose `lines()` are for people, whose fields are its JSON, and whose `exit_status`, if
it has one, is the command's. Of those on the page a second function looks at what would be decided about.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Final, Literal

from stormproof.core.base.errors import UsageError
from stormproof.trident.terms.transaction_states import OperatorAction

SHOWN_IDS: Final = 20


@dataclass(frozen=True, slots=True)
class Field:
    """One thing that a decision is given: an argument or option of the command, and a field of the page's form.

    `kind` is a text, several texts, a whole number, a share from 0 to 1, a time in seconds, a checkbox, or a payload, which
    is a large text that keeps its line ends.
    """

    name: str
    help: str = ""
    """What it is, on the command line."""
    kind: Literal["text", "texts", "number", "share", "seconds", "checkbox", "payload"] = "text"
    label: str = ""
    """What it is, on the page; without one it is not there."""
    hint: str = ""
    required: bool = False
    is_argument: bool = False
    """It has no option's name, though it may be left out."""
    metavar: str | None = None
    default: Any = None
    least: int | None = None
    confirms: bool = False
    """It is filled in with the confirmation; the others say what the decision is about."""

    @property
    def option(self) -> str:
        """The command line's name of it."""
        return f"--{self.name.removesuffix('_s').replace('_', '-')}"

    @property
    def input(self) -> str:
        """The kind of HTML's field."""
        return {"texts": "hidden", "share": "text", "seconds": "number"}.get(self.kind, self.kind)


@dataclass(frozen=True, slots=True)
class DecisionPreview:
    """What a decision would be about if it were taken now.

    `facts` are compared with those at the time of the confirmation: if one differs, nothing is done. `fixed` are values that
    the work gets as they were looked at: a message that comes later is not touched. `said` are further lines for people.
    `nothing` says why there is nothing to decide.
    """

    facts: Mapping[str, str]
    count: int | None = None
    noun: str = "message"
    fixed: Mapping[str, Any] = field(default_factory=dict[str, Any])
    said: tuple[str, ...] = ()
    classes: tuple[tuple[str, ...], ...] = ()
    """A table of what is counted; the first row has the heads."""
    nothing: str | None = None
    prefilled: Mapping[str, str] = field(default_factory=dict[str, str])
    """Values of the confirmation's own fields."""


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. `do` and `look` name functions, from `stormproof.trident` on; without `look` it is not on the page.

    `warning` is shown where the decision cannot be taken back. `preset` are values that the work gets whatever is chosen.
    """

    command: str
    title: str
    says: str
    """One sentence: what it does."""
    do: str
    fields: Sequence[Field] = ()
    more: str = ""
    """The rest of the command's help."""
    look: str = ""
    button: str = ""
    warning: str = ""
    preset: Mapping[str, Any] = field(default_factory=dict[str, Any])
    subject: Literal["topology", "queue", "table"] = "topology"
    """What the command is about; a ``table`` may be a topology, whose tables are meant, or one of them."""
    takes_every: bool = False
    """Without a topology the command is about all of them."""
    asks_who: bool = False
    """The command takes nobody for granted who decides."""
    called: str = ""
    made: bool = True
    """Its command is made from this; else it is written by hand, or another decision's."""

    @property
    def name(self) -> str:
        """Its name on the page."""
        return self.called or self.command.rpartition(" ")[2]

    @property
    def choice(self) -> list[Field]:
        """The page's fields that say what it is about: they are in the address."""
        return [one for one in self.fields if one.label and not one.confirms]

    @property
    def given(self) -> list[Field]:
        """The page's fields that are filled in with the confirmation."""
        return [one for one in self.fields if one.label and one.confirms]

    def works(self) -> Callable[..., Any]:
        """What it does."""
        work: Callable[..., Any] = _named(self.do)
        return work

    def looks(self) -> Callable[..., DecisionPreview]:
        """What looks at what it would be about."""
        look: Callable[..., DecisionPreview] = _named(self.look)
        return look

    def shell(self, subject: str, values: Mapping[str, Any]) -> str:
        """The same at a shell."""
        known = {one.name: one for one in self.fields}
        words, options = list[str](), list[str]()
        for name, value in {**self.preset, **values}.items():
            one = known.get(name, Field(name))
            if isinstance(value, bool):
                options += [one.option] if value else []
            elif isinstance(value, tuple):
                words += [*map(shlex.quote, value[:SHOWN_IDS]), *(["..."] if len(value) > SHOWN_IDS else [])]
            elif name in known and (one.required or one.is_argument):
                words.append(shlex.quote(str(value)))
            elif name in known:
                options.append(f"{one.option} {shlex.quote(str(value))}")
        options += [f"{one.option} FILE" for one in self.fields if one.kind == "payload"]
        return " ".join([f"stormproof {self.command}", shlex.quote(subject), *words, *options])


def _named(path: str) -> Any:
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"stormproof.trident.{module}"), name)


_TXID: Final = Field("txid", "The batch's number, as `status` and `audit` show it.", "number", "Txid", required=True)
_SINK: Final = Field("sink", "The sink's name, as `status` shows it.", label="Sink", required=True)
_DRY_RUN: Final = Field("dry_run", "Only show what would be removed.", "checkbox")
_ANY_SINK: Final = Field("sink", "Only this sink's table. Default: every Delta table.", is_argument=True)
_WAIT: Final = Field(
    "wait_s",
    "Wait so long for the effect. Default: until the driver has heard.",
    "seconds",
    metavar="SECONDS",
    least=0,
)


def _of_driver(action: OperatorAction, says: str, more: str) -> Decision:
    """What is asked of a topology's driver."""
    title = action.value.capitalize()
    return Decision(
        action.value,
        title,
        says,
        "decisions.driver.ask_driver",
        (_WAIT,),
        more,
        look="decisions.driver.look",
        button=title,
        preset={"action": action},
    )


LETTERS: Final = (
    Field("id", "The messages' ids.", "texts", "Messages", is_argument=True, metavar="ID..."),
    Field("source", "Only of this source or spout.", label="Source or spout"),
    Field(
        "reason",
        "Reason of the last failure: error, bad_message, refused, ...",
        label="Reason",
        hint="error, timeout, refused, ...",
    ),
    Field(
        "component",
        "Component of the last failure; of a reject, the sink.",
        label="Component",
        hint="of the last failure",
    ),
    Field(
        "error_class",
        "Class of the error, such as ValueError; of a reject the SQLSTATE or its class, 23505 or 23.",
        label="Error class",
        hint="as ValueError; SQLSTATE 23505, or the class 23",
    ),
    Field(
        "match",
        "TEXT in the error, the payload or the refused row.",
        label="Text",
        hint="in error, payload or refused row",
        metavar="TEXT",
    ),
    Field(
        "since",
        "Dead since this time, or an age such as 2h.",
        label="Dead since",
        hint="a time, or an age as 2h",
        metavar="TIME",
    ),
    Field(
        "until",
        "Dead before this time, or an age such as 2h.",
        label="Dead before",
        hint="a time, or an age as 2h",
        metavar="TIME",
    ),
    Field("sink", "Rejected by this sink; decide only there.", label="Rejected by sink"),
    Field("first", "Rejected in this txid or later.", "number", "Rejected from txid", metavar="TXID"),
    Field("last", "Rejected in this txid or earlier.", "number", "Rejected to txid", metavar="TXID"),
    Field("all", "All that wait for a decision.", "checkbox", "All of them", "with no filter"),
)
_CANARY: Final = (
    Field(
        "canary",
        "Requeue N first, the rest in growing waves, while few enough fail.",
        "number",
        "Canary: first",
        "messages",
        metavar="N",
        least=1,
        confirms=True,
    ),
    Field(
        "max_failures",
        "With --canary: share of a wave that may fail, such as 0.05. Default: 0.",
        "share",
        "Share that may fail",
        "0.05; default 0",
        metavar="SHARE",
        confirms=True,
    ),
    Field(
        "wait_s",
        "With --canary: most seconds until a wave is decided. Default: 300.",
        "seconds",
        "Seconds for each wave",
        "default 300",
        metavar="SECONDS",
        confirms=True,
    ),
)

DECISIONS: Final = (
    _of_driver(
        OperatorAction.PAUSE,
        "Commit the batches in flight, and open no more until the topology is resumed, also in later drivers.",
        "Exit status: 0 if the driver has heard (with --wait: is paused), or none runs; 1 if it is not paused after --wait; "
        '4 if it does not answer. Example: stormproof pause orders --why "the lake is being moved" --wait 60',
    ),
    _of_driver(
        OperatorAction.RESUME,
        "Let a paused topology open batches again.",
        "Exit status: as of pause. Example: stormproof resume orders",
    ),
    _of_driver(
        OperatorAction.DRAIN,
        "Let the driver open no new messages, and end once none is pending or waits for a retry.",
        "Do this before you change the topology. Exit status: 0 if the driver has heard (with --wait: has ended); 1 if it "
        "has not ended after --wait; 2 if none runs; 4 if it does not answer. "
        'Example: stormproof drain orders --why "version 12" --wait 600',
    ),
    _of_driver(
        OperatorAction.STOP,
        "Let the driver end after the batches in flight.",
        "Exit status: as of drain, but 0 if no driver runs. "
        'Example: stormproof stop orders --why "the host is being patched" --wait 60',
    ),
    Decision(
        "retry",
        "Retry a blocked batch",
        "Unblock a txid once its cause is repaired; the next start commits it.",
        "decisions.skips.retry_txid",
        (_TXID,),
        'Example: stormproof retry orders 17 --why "the disk has room again"',
        look="decisions.skips.look_at_blocked",
        button="Retry",
    ),
    Decision(
        "ledger skip",
        "Skip a sink for a batch",
        "Give up the rows of a blocked or prepared txid at one sink, as rejects on record.",
        "decisions.skips.give_up",
        (
            *(_TXID, _SINK),
            Field(
                "rows",
                "Give up only the rows that the sink's Postgres table refuses; it gets the others at once.",
                "checkbox",
            ),
            Field(
                "messages",
                "Keep its messages as rejects of the sink, which `dead-letters requeue` runs again.",
                "checkbox",
            ),
        ),
        "The other sinks get the txid at the next start, and its messages are confirmed. --messages is for lost prepared "
        "files: the next start reads the messages from the source, which must still have them.",
        look="decisions.skips.look",
        button="Give these rows up",
        warning="The sink never gets these rows; they become rejects, on record.",
    ),
    Decision(
        "ledger skip",
        "Skip the rows that a sink refuses",
        "Write every message whose rows the sink's Postgres table takes, and give up the others' rows, on record.",
        "decisions.skips.give_up",
        (_TXID, _SINK),
        look="decisions.skips.look",
        button="Give the refused rows up",
        warning="The refused rows become rejects; the sink gets the others at once.",
        preset={"rows": True},
        called="skip-rows",
        made=False,
    ),
    Decision(
        "ledger adopt",
        "Adopt another incarnation's rows",
        "Let a topology write to a table that has rows of another topology, or of a lost ledger. Those rows stay.",
        "decisions.refused_start.adopt_incarnation",
        (
            Field(
                "incarnation",
                "As the refused start names it.",
                label="Incarnation",
                hint="INCARNATION or NAME/INCARNATION",
                required=True,
                metavar="[NAME/]INCARNATION",
            ),
        ),
        look="decisions.refused_start.look_at_incarnation",
        button="Adopt",
        warning="The topology may then write beside rows that another life, or another topology, wrote.",
    ),
    Decision(
        "ledger accept-change",
        "Accept a changed graph",
        "Let a topology continue with other columns, keys or folds of its sinks than before.",
        "decisions.refused_start.accept_change",
        (Field("fingerprint", "As the refused start names it.", label="Fingerprint", required=True),),
        look="decisions.refused_start.look_at_change",
        button="Accept",
        warning="What the tables hold stays as it is, under other columns, keys or folds than before.",
    ),
    Decision(
        "ledger accept-loss",
        "Accept what a server lost",
        "Accept, on record, messages that a source's server removed or lost, or may have lost.",
        "decisions.refused_start.accept_loss",
        (
            Field(
                "fingerprint", "Accept this loss. Default: show what is open, with its fingerprint.", is_argument=True
            ),
        ),
        "`audit verify` then has it as a note `loss_accepted`, and judges all else. A later loss is open again.",
        look="decisions.refused_start.look_at_losses",
        button="Accept",
        warning="Messages that were never read stay lost, and the verdict says clean where all else is.",
    ),
    Decision(
        "ledger adopt-table",
        "Adopt a table",
        "Make a table that was restored from a dump the sink's own, if it has the rows that the ledger says.",
        "decisions.adopt_table.adopt_table",
        (
            _SINK,
            Field(
                "accept_loss",
                "Give up missing rows of committed txids; create a missing table.",
                "checkbox",
                "Give up rows that are gone",
                "on record",
            ),
        ),
        "Missing rows are listed, and refused without --accept-loss. Their messages are not read again.",
        look="decisions.adopt_table.look",
        button="Adopt this table",
        warning="Rows that are given up are not written again, and their messages are not handed out again.",
    ),
    Decision(
        "ledger release-table",
        "Release a table",
        "Release a table that a topology has claimed and never written to, for another topology.",
        "decisions.adopt_table.release_table",
        (_SINK,),
        "The topology's next start claims it again, and is refused if another topology has it by then.",
        look="decisions.adopt_table.look_at_release",
        button="Release",
    ),
    Decision(
        "ledger prune",
        "Prune the ledger",
        "Remove old batches from the ledger, except what a sink, a waiting message or an open batch needs.",
        "decisions.pruning.prune_ledger",
        (
            Field(
                "older_than",
                "An age such as 30d, 12h or 2w.",
                label="Older than",
                hint="as 30d, 12h, 2w; default 30d",
                metavar="AGE",
                default="30d",
            ),
            _DRY_RUN,
        ),
        "Rejects, skips and decisions stay. The audit then begins after the pruned txids, and says so.",
        look="decisions.pruning.look",
        button="Prune",
        warning="The record of these batches is removed; the audit then begins after them, and says so.",
        takes_every=True,
    ),
    Decision(
        "forget",
        "Forget a topology",
        "Remove a topology from the ledger: its batches, events, dead letters, rejects and position in the source.",
        "decisions.forget.forget",
        (_DRY_RUN,),
        "It must not run. Its tables stay; those that it never wrote to are free for another topology. What stays is "
        "printed and recorded. A queue keeps no messages for it any more. A later topology of its name reads its source "
        "from the start. Example: stormproof forget weather --by ann --dry-run",
        asks_who=True,
    ),
    Decision(
        "queue unsubscribe",
        "Unsubscribe a reader",
        "Remove a queue's reader that belongs to no topology here, with its pending, waiting and dead messages.",
        "decisions.forget.unsubscribe",
        (Field("subscription", "The reader's name, as `queue list QUEUE` shows it.", required=True), _DRY_RUN),
        "The queue keeps no messages for it any more. `stormproof forget` removes a topology's reader. A program that "
        "subscribes under the name again reads the queue from its start. "
        "Example: stormproof queue unsubscribe orders old --by ann",
        subject="queue",
        asks_who=True,
    ),
    Decision(
        "queue adopt",
        "Adopt a queue",
        "Make a queue's positions valid on this server, after a dump and restore, a fail-over, or pg_upgrade.",
        "decisions.adopt_queue.adopt_queue",
        (Field("accept_unproven", "Adopt although something is not proven, on record; needs --why.", "checkbox"),),
        "Compares ledger, sinks and queue first. Exit status: 0 if adopted, or nothing to adopt; 4 if something is not "
        "proven: it is named, and nothing was changed.",
        subject="queue",
    ),
    Decision(
        "compact",
        "Compact tables",
        "Join a Delta table's small files into large ones. No row changes, and the driver may run.",
        "decisions.upkeep.compact",
        (
            _ANY_SINK,
            Field(
                "target_mib",
                "Join smaller files into files of this size, in MiB. Default: the table's own, else 100.",
                "number",
                least=1,
            ),
        ),
        "The old files stay until a vacuum. Exit status: 1 if a table could not be compacted; it is unchanged. "
        "Example: stormproof compact orders",
        subject="table",
    ),
    Decision(
        "vacuum",
        "Vacuum tables",
        "Remove files of old versions of a Delta table, which a compaction or a merge has replaced.",
        "decisions.upkeep.vacuum",
        (
            _ANY_SINK,
            Field(
                "retain_hours",
                "Keep files that were removed from the table within so many hours. Default: the table's own, else 168.",
                "number",
                least=1,
            ),
            Field("dry_run", "List the files, and remove none.", "checkbox"),
        ),
        "Prepared files are kept, and the driver may run. Versions older than the retention cannot be read afterwards. "
        "Exit status: 1 if a table could not be vacuumed. Example: stormproof vacuum orders --dry-run",
        subject="table",
    ),
    Decision(
        "repair",
        "Repair tables",
        "Repair a Delta table that has wrong file statistics or duplicate keys, as `audit verify --deep` finds them.",
        "decisions.upkeep.repair",
        (_ANY_SINK, Field("dry_run", "Show what is wrong, and change nothing.", "checkbox")),
        "delta-rs wrote wrong statistics for decimals of more than 15 digits: filters and merges then miss rows, and keys "
        "are doubled. Every file is read; the repair is one version of the table, or two where Spark commits, and the "
        "driver may run. Of an upsert's duplicate key the newest row by order_by stays. A fold's rows are merged if the log "
        "proves that this is exact; otherwise they are listed and left. Exit status: 0 if nothing is wrong any more, and "
        "always with --dry-run; 1 if a table could not be repaired; 4 if something was left. "
        "Example: stormproof repair invoices --by ann",
        subject="table",
    ),
    Decision(
        "dead-letters requeue",
        "Requeue dead letters",
        "Process dead letters again, with their failures counted from 0: those named, those of a filter, or all.",
        "web.proposals.requeue",
        (*LETTERS, *_CANARY),
        "A rejected message is processed again for that sink alone. Repair the table first: a row that it refuses again is "
        "rejected again, and counts as failed for a canary.\n\n"
        "With --canary each wave begins once every message of the last one is confirmed or has failed again, while at most "
        "--max-failures of a wave fail; the topology's driver must run. Exit status: 1 if some were not requeued; it says "
        "why. "
        "Example: stormproof dead-letters requeue orders --reason error --canary 10",
        look="web.proposals.look",
        button="Requeue",
        made=False,
    ),
    Decision(
        "dead-letters drop",
        "Drop dead letters",
        "Give dead letters up for good, on record: those named, those of a filter, or all.",
        "web.proposals.drop",
        LETTERS,
        "A rejected message is given up at that sink alone.\n\n"
        'Example: stormproof dead-letters drop orders 753-12 --why "a test message"',
        look="web.proposals.look",
        button="Drop",
        warning="They are given up for good: nothing hands them out again.",
        made=False,
    ),
    Decision(
        "dead-letters edit",
        "Edit a dead letter and requeue it",
        "Requeue a dead letter with another payload; the old payload stays on record.",
        "web.proposals.edit",
        (
            Field("id", label="Message", required=True),
            Field("payload", "The new payload.", "payload", "Payload", required=True, confirms=True),
        ),
        look="web.proposals.look_at_one",
        button="Requeue with this payload",
        made=False,
    ),
    Decision(
        "dead-letters retry",
        "Retry what waits",
        "Retry at once the messages that failed and wait for their retry; they are no dead letters yet.",
        "decisions.dead_letters.retry_waiting",
        (),
        'Their failures stay counted. Example: stormproof dead-letters retry orders --why "the service answers again"',
    ),
)
"""Every one that is declared; the page's name of it tells each from the others."""

ELSEWHERE: Final[Mapping[str, str]] = {
    "compact": "it decides nothing about messages, and may run for minutes",
    "vacuum": "it decides nothing about messages, and may run for minutes",
    "repair": "it reads whole tables, and may run for minutes",
    "queue adopt": "it belongs to a restore, which is done at a shell, and reads every sink before it answers",
    "forget": "the page itself forgets the topology, and has nowhere to show what stays",
    "queue unsubscribe": "the page shows topologies, and the reader is none's",
    "ledger migrate": "the page needs a ledger to be there at all",
    "dead-letters retry": "a message that waits is handed out by itself; it is a hurry, and no page lists it",
}
"""What a person decides by a command alone, and why."""


def on_the_page(name: str) -> Decision:
    """A decision of the page, by its name there.

    Raises:
        UsageError: there is none.
    """
    known = {one.name: one for one in DECISIONS if one.look}
    if name not in known:
        raise UsageError(f"there is no decision {name[:40]!r}; there are {', '.join(known)}")
    return known[name]
