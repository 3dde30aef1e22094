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

from stormproof.core.errors import UsageError
from stormproof.trident.transaction_states import OperatorAction

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
class Look:
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
    subject: Literal["topology", "queue"] = "topology"
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

    def looks(self) -> Callable[..., Look]:
        """What looks at what it would be about."""
        look: Callable[..., Look] = _named(self.look)
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
_WAIT: Final = Field(
    "wait_s",
    "Wait for its effect for so long. Default: until the driver has heard.",
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
    Field("source", "Of this source (or spout) only.", label="Source or spout"),
    Field(
        "reason",
        "Its last failure has this reason: error, bad_message, refused, ...",
        label="Reason",
        hint="error, timeout, refused, ...",
    ),
    Field(
        "component",
        "Its last failure was in this component; of a rejected one, the sink.",
        label="Component",
        hint="of the last failure",
    ),
    Field(
        "error_class",
        "Died of this class of error, as in ValueError; or refused with this SQLSTATE, or a class of them: 23505, 23.",
        label="Error class",
        hint="as ValueError; SQLSTATE 23505, or the class 23",
    ),
    Field(
        "match",
        "TEXT is in the error, the payload, or the refused row.",
        label="Text",
        hint="in error, payload or refused row",
        metavar="TEXT",
    ),
    Field(
        "since",
        "Dead since this time, or age as 2h.",
        label="Dead since",
        hint="a time, or an age as 2h",
        metavar="TIME",
    ),
    Field(
        "until",
        "Dead before this time, or age as 2h.",
        label="Dead before",
        hint="a time, or an age as 2h",
        metavar="TIME",
    ),
    Field("sink", "Rejected by this sink, and only there.", label="Rejected by sink"),
    Field("first", "Rejected by a sink in this txid or later.", "number", "Rejected from txid", metavar="TXID"),
    Field("last", "Rejected by a sink in this txid or earlier.", "number", "Rejected to txid", metavar="TXID"),
    Field("all", "Every undecided dead letter of the topology.", "checkbox", "All of them", "with no filter"),
)
_CANARY: Final = (
    Field(
        "canary",
        "Hand out N first; the rest in growing waves, while few enough fail.",
        "number",
        "Canary: first",
        "messages",
        metavar="N",
        least=1,
        confirms=True,
    ),
    Field(
        "max_failures",
        "With --canary: share of a wave that may fail, as 0.05. Default: 0.",
        "share",
        "Share that may fail",
        "0.05; default 0",
        metavar="SHARE",
        confirms=True,
    ),
    Field(
        "wait_s",
        "With --canary: how long each wave may take to be decided. Default: 300.",
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
        "Have a topology open no more batches until it is resumed; those in flight are committed. Later drivers obey, too.",
        "Exit status: 0 if the driver has heard (with --wait: is paused), or none runs; 1 if it is not paused after --wait; "
        '4 if it does not answer. Example: stormproof pause orders --why "the warehouse is being repaired" --wait 60',
    ),
    _of_driver(
        OperatorAction.RESUME,
        "Have a paused topology open batches again.",
        "Exit statuses are those of pause. Example: stormproof resume orders",
    ),
    _of_driver(
        OperatorAction.DRAIN,
        "Have the driver open no new messages, and end once none is pending and none waits for a retry.",
        "Do this before a change of the topology: no message is then half done by the old one. Exit status: 0 if the driver "
        "has heard (with --wait: has ended); 1 if it has not ended after --wait; 2 if none runs; 4 if it does not answer. "
        'Example: stormproof drain orders --why "version 12" --wait 600',
    ),
    _of_driver(
        OperatorAction.STOP,
        "Have the driver end after the batches in flight.",
        "Exit statuses are those of drain, but 0 if no driver runs. "
        'Example: stormproof stop orders --why "the host is being patched" --wait 60',
    ),
    Decision(
        "retry",
        "Retry a blocked batch",
        "Let a blocked txid be tried again, once its cause is repaired; the topology's next start commits it.",
        "decisions.blocked.retry_txid",
        (_TXID,),
        'Example: stormproof retry orders 17 --why "the disk has room again"',
        look="decisions.blocked.look",
        button="Retry",
    ),
    Decision(
        "ledger skip",
        "Skip a sink for a batch",
        "Give up the rows of a blocked or prepared txid at one sink: they become rejects, on record.",
        "decisions.skips.give_up",
        (
            *(_TXID, _SINK),
            Field("rows", "Only the rows that the sink's Postgres table refuses; it gets the others.", "checkbox"),
            Field("messages", "Its messages are rejects of the sink, which can be retried for it alone.", "checkbox"),
        ),
        "The sink goes on from what it holds. The other sinks get the txid at the next start, and its messages are "
        "confirmed. With --rows the sink gets, at once, every message whose rows its table takes, and only the others are "
        "given up.\n\n"
        "With --messages the next start reads the txid's messages from the source, while it has them, and keeps each as a "
        "reject of the sink: `stormproof dead-letters requeue` runs them again. For where the prepared files are gone, and "
        "the messages are not.",
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
        "Let a topology write to a table with rows of another incarnation: of a lost ledger, or of another topology.",
        "decisions.starts.adopt_incarnation",
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
        "Those rows stay as they are.",
        look="decisions.starts.look_at_incarnation",
        button="Adopt",
        warning="The topology may then write beside rows that another life, or another topology, wrote.",
    ),
    Decision(
        "ledger accept-change",
        "Accept a changed graph",
        "Let a topology go on although its sinks are given other columns, keys or folds than before.",
        "decisions.starts.accept_change",
        (Field("fingerprint", "As the refused start names it.", label="Fingerprint", required=True),),
        look="decisions.starts.look_at_change",
        button="Accept",
        warning="What the tables hold stays as it is, under other columns, keys or folds than before.",
    ),
    Decision(
        "ledger accept-loss",
        "Accept what a server lost",
        "Accept, on record, what a source's server removed or lost, or where it cannot be told.",
        "decisions.losses.accept_loss",
        (Field("fingerprint", "As shown without it; default: only show.", is_argument=True),),
        "Without FINGERPRINT it shows what is on record and was not accepted, and the fingerprint that accepts exactly "
        "that. `audit verify` then has it as a note `loss_accepted`, and its verdict is of all else. What is noted later "
        "stays open.",
        look="decisions.losses.look",
        button="Accept",
        warning="Messages that were never read stay lost, and the verdict says clean where all else is.",
    ),
    Decision(
        "ledger adopt-table",
        "Adopt a table",
        "Make a table that was restored from a dump a sink's own; it must be able to hold what the ledger says.",
        "decisions.adopt_table.adopt_table",
        (
            _SINK,
            Field(
                "accept_loss",
                "Give up rows of committed txids that are gone; create the table if it is gone.",
                "checkbox",
                "Give up rows that are gone",
                "on record",
            ),
        ),
        "If rows are missing, they are named; `--accept-loss` gives them up, on record. Their messages are not handed out "
        "again.",
        look="decisions.adopt_table.look",
        button="Adopt this table",
        warning="Rows that are given up are not written again, and their messages are not handed out again.",
    ),
    Decision(
        "ledger release-table",
        "Release a table",
        "Give up a table that a topology has claimed and never wrote to, so that another topology can claim it.",
        "decisions.release_table.release_table",
        (_SINK,),
        "The next start of this topology claims a table again, and is refused if another topology has it by then.",
        look="decisions.release_table.look",
        button="Release",
    ),
    Decision(
        "ledger prune",
        "Prune the ledger",
        "Remove old batches from the ledger, but nothing that a sink, a waiting message or an open batch needs.",
        "decisions.pruning.prune_ledger",
        (
            Field(
                "older_than",
                "As in 30d, 12h, 2w.",
                label="Older than",
                hint="as 30d, 12h, 2w; default 30d",
                metavar="AGE",
                default="30d",
            ),
            _DRY_RUN,
        ),
        "Rejects, skips and operators' decisions stay. The audit then begins after the pruned txids, and says so.",
        look="decisions.pruning.look",
        button="Prune",
        warning="The record of these batches is removed; the audit then begins after them, and says so.",
        takes_every=True,
    ),
    Decision(
        "forget",
        "Forget a topology",
        "Forget a topology that does not run: its batches, events, dead letters, rejects, and how far it read its source.",
        "decisions.forget.forget",
        (_DRY_RUN,),
        "Its tables stay, with their rows and their own record of them; those that it never wrote to are free for another "
        "one. What stays is said, and kept on record with who decided. A queue keeps nothing back for it any more. A "
        "topology of its name that starts later reads its source from the start. "
        "Example: stormproof forget weather --by ann --dry-run",
        asks_who=True,
    ),
    Decision(
        "queue unsubscribe",
        "Unsubscribe a reader",
        "Remove a queue's reader that belongs to no topology here; what was pending, waiting or dead of it is removed, too.",
        "decisions.forget.unsubscribe",
        (Field("subscription", "The reader's name, as `queue stats` shows it.", required=True), _DRY_RUN),
        "The queue keeps nothing back for it any more. A topology's reader goes with it: stormproof forget. A program that "
        "subscribes under the name again reads the queue from its start. "
        "Example: stormproof queue unsubscribe orders old --by ann",
        subject="queue",
        asks_who=True,
    ),
    Decision(
        "dead-letters requeue",
        "Requeue dead letters",
        "Hand dead letters out again, with their failures counted from 0: those named, those that a filter chooses, or all.",
        "web.decide.letters.requeue",
        (*LETTERS, *_CANARY),
        "What a sink rejected is opened again for that sink alone: the other sinks hold it. Repair the table first: what it "
        "refuses again is rejected again, and a canary counts it as failed.\n\n"
        "With --canary the first N are handed out, then, once each of them is confirmed or has failed again, the rest in "
        "growing waves, while at most --max-failures of a wave fail; the topology's driver must run. Exit status 1: some "
        "were not handed out, and it says why. "
        "Example: stormproof dead-letters requeue orders --where reason=error --canary 10",
        look="web.decide.letters.look",
        button="Requeue",
        made=False,
    ),
    Decision(
        "dead-letters drop",
        "Drop dead letters",
        "Give dead letters up for good: those named, those that a filter chooses, or all. That is recorded.",
        "web.decide.letters.drop",
        LETTERS,
        "What a sink rejected is given up at that sink: the other sinks hold it.\n\n"
        'Example: stormproof dead-letters drop orders 753-12 --why "a test message"',
        look="web.decide.letters.look",
        button="Drop",
        warning="They are given up for good: nothing hands them out again.",
        made=False,
    ),
    Decision(
        "dead-letters edit",
        "Edit a dead letter and requeue it",
        "Hand a dead letter out again with another payload; the old one, and who replaced it, stay on record.",
        "web.decide.letters.edit",
        (
            Field("id", label="Message", required=True),
            Field("payload", "The new payload.", "payload", "Payload", required=True, confirms=True),
        ),
        look="web.decide.letters.look_at_one",
        button="Requeue with this payload",
        made=False,
    ),
    Decision(
        "dead-letters retry",
        "Retry what waits",
        "Hand out now the messages that failed and wait for their retry: they are no dead letters yet.",
        "decisions.dead_letters.retry_waiting",
        (),
        "Each has it in its history; its failures stay counted. "
        'Example: stormproof dead-letters retry orders --why "the service answers again"',
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
