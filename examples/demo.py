r"""The word count through kill -9: a text is counted exactly once while its driver is killed again and again.

    make demo                    everything, on Spark
    make demo ARGS=--tamper      the same, and then a row is changed behind Stormproof's back: the demo must fail

A text of 11,453 lines goes into a Postgres queue, one message a line. Its words are counted into a Delta table and a
Postgres table. Some messages fail on their first try, one is poison, and the driver is killed with SIGKILL at eight
failpoints and started again. In the end both tables are compared with a count made from the text alone.

It uses a Postgres of its own in `.demo/`, whatever the environment names. Status 0 where everything agrees, else 1.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import pydoc_data.topics
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import psycopg
from demo_drivers import KILLED, Drivers, Kill
from demo_topology import POISON
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from stormproof.core.base.failpoint import FAILPOINTS
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.source import Database
from stormproof.trident.cli.output import print_table

CLONE: Final = Path(__file__).resolve().parents[1]
JARS: Final = CLONE / ".jars"
TOPOLOGY: Final = "word-count"
QUEUE: Final = "lines"
TABLE: Final = "word_counts"
MASTER: Final = "local[2]"
TOP_WORDS: Final = 10
SHOWN: Final = 6
READING_TIMEOUT_S: Final = 120.0
KILLS: Final = (
    Kill("open.after", at=2),
    Kill("task.after_file"),
    Kill("prepare.after", at=2),
    Kill("delta.after_log_entry", at=2),
    Kill("postgres.after_rows", at=2),
    Kill("commit.after_sink", at=3),
    Kill("recover.after_each"),
    Kill("finish.before_commit"),
)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line says."""

    folder: Path
    engine: str
    lines: int | None
    batch_messages: int
    kills: tuple[Kill, ...]
    tamper: bool


class Problem(Exception):
    """The demo cannot go on; the text says why."""


def main() -> int:
    """Run the demo; returns the exit status."""
    options = parse_arguments(sys.argv[1:])
    console = Console(highlight=False)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    started_s = time.monotonic()
    try:
        with ExitStack() as stack:
            problems = show(options, console, stack)
    except (Problem, TimeoutError) as error:
        console.print(Text(f"demo: {error}", style="red"))
        return 1
    except KeyboardInterrupt:
        console.print("demo: interrupted; everything that it started was ended")
        return 130
    console.print(f"\n{time.monotonic() - started_s:.0f} s in all. To look around: cd {options.folder}")
    console.print(f"  STORMPROOF_HOME=home {sys.executable} -m stormproof audit verify {TOPOLOGY}", soft_wrap=True)
    for problem in problems:
        console.print(Text(f"DIFFERS: {problem}", style="red"))
    verdict = "NOT AS PROMISED" if problems else "Exactly once: nothing lost, nothing doubled, in either table."
    console.print(Text(verdict, style="bold red" if problems else "bold green"))
    return 1 if problems else 0


def parse_arguments(arguments: Sequence[str]) -> Options:
    """The options; without any, the whole demo."""
    parser = argparse.ArgumentParser(prog="demo", description="The word count through kill -9, with its proof.")
    parser.add_argument("--folder", type=Path, default=CLONE / ".demo", help="where everything goes; emptied first")
    parser.add_argument("--engine", choices=("spark", "inline"), default="spark", help="inline needs no Java")
    parser.add_argument("--lines", type=int, help="only so many lines of the text")
    parser.add_argument("--batch", type=int, default=1000, help="most messages in a batch")
    parser.add_argument("--kills", type=int, default=len(KILLS), help="only so many of the kills")
    parser.add_argument("--tamper", action="store_true", help="change a row at the end: the demo must notice")
    given = parser.parse_args(arguments)
    return Options(given.folder.absolute(), given.engine, given.lines, given.batch, KILLS[: given.kills], given.tamper)


def show(options: Options, console: Console, stack: ExitStack) -> list[str]:
    """Everything from the empty folder to the comparison; returns what was not as it should be."""
    folder = options.folder
    forget_environment()
    stack.enter_context(alone_in(folder))
    postgres = EmbeddedPostgres(folder / "home")
    start_afresh(folder, postgres)

    text = text_of(options.lines)
    step(console, "the text", f"{len(text)} lines, {sum(len(line.split()) for line in text)} words (pydoc_data.topics)")
    database = stack.enter_context(postgres)
    step(console, "Postgres", f"embedded, in {folder / 'home'}")
    put = fill_queue(folder, text)
    step(console, "the queue", f"{put} messages put, one of them poison")

    drivers = make_drivers(options)
    stack.callback(drivers.close)
    starting = "; Spark takes some seconds for each start" if options.engine == "spark" else ""
    step(console, "the drivers", f"{len(options.kills)} are killed with SIGKILL, each at another failpoint{starting}")
    problems = run_through_kills(drivers, options.kills, console, put, database)
    if problems:
        return problems
    if options.tamper:
        tamper(database)

    with ExitStack() as reading:
        if options.engine == "spark":
            read_delta = reading.enter_context(reading_by_spark(options))
        else:
            read_delta = partial(read_by_delta_rs, options.folder / "lake" / TABLE)
        problems += show_replays(console, folder)
        problems += show_dead_letters(console, folder)
        problems += show_verdict(console, folder)
        reader = "Spark" if options.engine == "spark" else "delta-rs"
        step(console, "\nreading", f"the Delta table through {reader}, the Postgres table by SQL")
        tables = {"Delta": read_delta(), "Postgres": read_postgres(database)}
    return problems + show_comparison(console, text, tables)


def step(console: Console, what: str, text: str) -> None:
    """A line of progress."""
    console.print(Text.assemble((f"{what:<12}", "bold"), text))


# -- where it all happens ----------------------------------------------------------------------------------------------


def forget_environment() -> None:
    """Remove settings of the shell: neither the demo nor its child processes may touch a Postgres that it names."""
    for name in list(os.environ):
        if name.startswith(("STORMPROOF_", "PG")):
            del os.environ[name]


@contextmanager
def alone_in(folder: Path) -> Generator[None]:
    """One demo at a time in a folder; the kernel drops the lock with its holder."""
    folder.mkdir(parents=True, exist_ok=True)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise Problem(f"another demo is at work in {folder}; wait for it, or choose another --folder") from None
    finally:
        os.close(lock)


def start_afresh(folder: Path, postgres: EmbeddedPostgres) -> None:
    """Remove the files of an earlier demo, and end the processes that it left if it was killed."""
    unknown = {entry.name for entry in folder.iterdir()} - {"lock", "home", "lake", "marks", "text", "drivers.json"}
    if any(not name.startswith("driver-") for name in unknown):
        raise Problem(f"{folder} holds {', '.join(sorted(unknown)[:5])}, which no demo made; choose another --folder")
    Drivers.end_left_overs(folder)
    if postgres.pid is not None:
        postgres.stop("immediate")
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name != "lock":
            entry.unlink()
    (folder / "marks").mkdir()


def environment_of(folder: Path) -> dict[str, str]:
    """The environment of child processes, which run in the demo's folder, where there is no settings file."""
    return {
        **os.environ,
        # Each driver runs for seconds only: compiling all its code thoroughly would take half of them.
        "JAVA_TOOL_OPTIONS": f"{os.environ.get('JAVA_TOOL_OPTIONS', '')} -XX:TieredStopAtLevel=1 -XX:+UseSerialGC".strip(),
        "STORMPROOF_HOME": str(folder / "home"),
        "STORMPROOF_MASTER": MASTER,
        "STORMPROOF_LOG_FORMAT": "json",
        "STORMPROOF_DELTA_JARS_DIR": str(JARS),
    }


def stormproof(folder: Path, *arguments: str, statuses: Sequence[int] = (0,)) -> tuple[int, dict[str, Any]]:
    """Run a command of the command line with --json; returns exit status and report."""
    done = subprocess.run(
        [sys.executable, "-m", "stormproof", *arguments, "--json"],
        env=environment_of(folder),
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode not in statuses:
        raise Problem(f"stormproof {' '.join(arguments)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.returncode, json.loads(done.stdout)


# -- the text and the queue --------------------------------------------------------------------------------------------


def text_of(lines: int | None) -> list[str]:
    r"""The reference text that this very Python ships, split at ``\n`` only; empty lines are lines."""
    return "\n".join(pydoc_data.topics.topics.values()).split("\n")[:lines]


def fill_queue(folder: Path, text: Sequence[str]) -> int:
    """Put each line as a message, with the poison in the middle; returns how many were put."""
    path = folder / "text"
    middle = len(text) // 2
    lines = [*text[:middle], POISON, *text[middle:]]
    path.write_bytes("".join(f"{line}\n" for line in lines).encode())
    _, report = stormproof(folder, "queue", "put", QUEUE, "--lines", str(path))
    if report["messages"] != len(lines):
        raise Problem(f"{report['messages']} messages were put instead of {len(lines)}")
    return len(lines)


# -- the drivers -------------------------------------------------------------------------------------------------------


def make_drivers(options: Options) -> Drivers:
    """Drivers that run `examples/demo_topology.py`."""
    folder = options.folder
    target = f"{Path(__file__).with_name('demo_topology.py')}:topology"
    parameters = {"lake": folder / "lake", "marks": folder / "marks", "queue": QUEUE}
    command = [sys.executable, "-m", "stormproof", "run", target, "--until-idle"]
    command += ["--max-messages", str(options.batch_messages), "--engine", options.engine]
    command += [word for name, value in parameters.items() for word in ("--param", f"{name}={value}")]
    return Drivers(command, environment_of(folder), folder)


def run_through_kills(
    drivers: Drivers, kills: Sequence[Kill], console: Console, messages: int, database: Database
) -> list[str]:
    """Start drivers until the queue is empty, the first ones with a failpoint to die at."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        bar = progress.add_task("messages done", total=messages)

        def on_fact(word: str, facts: dict[str, Any]) -> None:
            if word == "recovered":
                progress.console.print(f"   recovered: {recovery_text(facts)}", soft_wrap=not console.is_terminal)
            progress.update(bar, completed=done_messages(database))

        for kill in kills:
            progress.update(bar, description=f"start {drivers.starts + 1}: to die at {kill.failpoint}")
            status = drivers.run(kill, on_fact)
            if status != KILLED:
                return [
                    f"start {drivers.starts} ended with {status} instead of at {kill.failpoint}: {drivers.log_path}"
                ]
            done = done_messages(database)
            progress.update(bar, completed=done)
            about = FAILPOINTS[kill.failpoint].about
            at = Text.assemble(
                f"{drivers.starts:>2} ", ("SIGKILL", "bold red"), f" at {kill.failpoint}: {about} ({done} done)"
            )
            progress.console.print(at, soft_wrap=not console.is_terminal)
        progress.update(bar, description=f"start {drivers.starts + 1}: to the end")
        status = drivers.run(None, on_fact)
        if status != 0:
            return [f"the last start ended with {status}: {drivers.log_path}"]
        done = done_messages(database)
    step(console, "the end", f"{drivers.starts} starts, {done} of {messages} messages done, the queue is empty")
    return [] if done == messages else [f"{messages - done} messages are neither committed nor dead letters"]


def recovery_text(facts: dict[str, Any]) -> str:
    """What a recovery did, in words."""
    names = {"rolled_forward": "rolled forward txid", "aborted": "gave back txid"}
    parts = [f"{name} {', '.join(map(str, facts[key]))}" for key, name in names.items() if facts.get(key)]
    parts += [f"{sink} held txid {txid} already: not applied twice" for txid, sink in facts.get("suppressed", ())]
    if facts.get("files_swept"):
        parts.append(f"files of dead attempts swept: {facts['files_swept']}")
    return "; ".join(parts) or "nothing was left undone"


def done_messages(database: Database) -> int:
    """How many messages are in a committed transaction or dead letters, as the ledger says at this moment."""
    with psycopg.connect(database.conninfo) as connection:
        exists = connection.execute("select to_regclass('stormproof.txn')").fetchone()
        if exists is None or exists[0] is None:
            return 0
        row = connection.execute(
            "select (select coalesce(sum(messages - failed), 0) from stormproof.txn where state = 'committed')"
            " + (select count(*) from stormproof.dead_letter)"
        ).fetchone()
    return 0 if row is None else int(row[0])


def tamper(database: Database) -> None:
    """Change a row of the result by hand, which the demo must notice."""
    with psycopg.connect(database.conninfo) as connection:
        connection.execute("update word_counts set n = n + 1 where word = 'the'")


# -- what is shown in the end ------------------------------------------------------------------------------------------


def show_replays(console: Console, folder: Path) -> list[str]:
    """What was replayed, and why; and which duplicates were suppressed."""
    _, replays = stormproof(folder, "audit", "replays", TOPOLOGY, "--limit", "10000")
    _, duplicates = stormproof(folder, "audit", "duplicates", TOPOLOGY)
    kinds = Counter(
        (row["what"], row["component"] or "", row["error_class"] or row["reason"]) for row in replays["rows"]
    )
    rows: list[tuple[object, ...]] = [(*kind, number) for kind, number in kinds.most_common(SHOWN)]
    rows += [("suppressed", row["sink"], f"txid {row['txid']}: {row['evidence']}", 1) for row in duplicates["rows"]]
    console.print("\nWhat was replayed, and why (stormproof audit replays, duplicates)")
    print_table(("what", "where", "why", "times"), rows, console.width, sys.stdout)
    return [] if any(what == "message" for what, *_ in kinds) else ["no message failed and was replayed"]


def show_dead_letters(console: Console, folder: Path) -> list[str]:
    """The one message that can never be processed."""
    _, report = stormproof(folder, "dead-letters", "list", TOPOLOGY)
    letters = report["dead_letters"]
    for letter in letters:
        error = letter["error"].splitlines()[0] if letter["error"] else ""
        text = f"{letter['id']} failed {letter['times_failed']} times ({letter['reason']}: {error}): {letter['text']!r}"
        console.print(Text.assemble(("\ndead letter  ", "bold"), text), soft_wrap=not console.is_terminal)
    found = [letter["text"] for letter in letters]
    return [] if found == [POISON] else [f"the dead letters are {found}, not just the poison"]


def show_verdict(console: Console, folder: Path) -> list[str]:
    """`audit verify`: ledger, sinks and queue must agree."""
    status, report = stormproof(folder, "audit", "verify", TOPOLOGY, statuses=(0, 1, 4))
    checked = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in report["checked"].items())
    verdict = {0: "clean", 1: "VIOLATIONS", 4: "cannot tell"}[status]
    console.print(Text.assemble(("audit verify ", "bold"), f"{verdict}: {checked}"), soft_wrap=not console.is_terminal)
    console.print(Text(f"             It proves: {report['proves']}"), soft_wrap=not console.is_terminal)
    found = [f"audit verify: {item['text']}" for item in (*report["violations"], *report["unknowns"])]
    return found or ([] if status == 0 else [f"audit verify ended with {status}"])


def show_comparison(console: Console, text: Sequence[str], tables: Mapping[str, list[tuple[str, int]]]) -> list[str]:
    """Compare both tables with a count that is made without Stormproof."""
    should = Counter(word for line in text for word in line.split())
    shown = Table(title=f"The {TOP_WORDS} most frequent words", title_justify="left")
    shown.add_column("word")
    for name in ("the text alone", *tables):
        shown.add_column(name, justify="right")
    held = [dict(rows) for rows in tables.values()]
    for word, n in should.most_common(TOP_WORDS):
        shown.add_row(Text(word), f"{n:,}", *(f"{counts.get(word, 0):,}" for counts in held))
    console.print(shown)
    problems: list[str] = []
    for name, rows in tables.items():
        wrong = differences(rows, should)
        verdict = "DIFFERS" if wrong else "equal to the text's own count"
        step(console, name, f"{len(rows):,} words, {sum(n for _, n in rows):,} in all: {verdict}")
        problems += [f"{name}: {item}" for item in wrong[:SHOWN]]
    return problems


def differences(rows: Sequence[tuple[str, int]], should: Counter[str]) -> list[str]:
    """The differences between a table's rows and the count; a word in two rows is one, too."""
    found = [f"{word!r} stands in {n} rows" for word, n in Counter(word for word, _ in rows).items() if n > 1]
    held = dict(rows)
    for word in sorted(held.keys() | should.keys()):
        if held.get(word) != should.get(word):
            found.append(f"{word!r} is counted {held.get(word, 'not at all')}, the text has {should.get(word, 'none')}")
    return found


@contextmanager
def reading_by_spark(options: Options) -> Generator[Callable[[], list[tuple[str, int]]]]:
    """Start to read the Delta table with Spark in another process; yields a function that waits for the rows."""
    table, home = options.folder / "lake" / TABLE, options.folder / "home"
    command = [sys.executable, str(Path(__file__).with_name("demo_read_delta.py")), str(table), str(home), str(JARS)]
    log_path = options.folder / "driver-reading.log"
    with log_path.open("wb") as log:
        child = subprocess.Popen(
            command,
            env=environment_of(options.folder),
            cwd=options.folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=log,
        )

    def rows() -> list[tuple[str, int]]:
        printed, _ = child.communicate(timeout=READING_TIMEOUT_S)
        if child.returncode != 0:
            raise Problem(f"Spark could not read the Delta table; see {log_path}")
        return [(word, n) for word, n in json.loads(printed)]

    with child:
        try:
            yield rows
        finally:
            child.kill()


def read_by_delta_rs(table: Path) -> list[tuple[str, int]]:
    """The Delta table without a JVM."""
    import pyarrow as pa
    from deltalake import DeltaTable, QueryBuilder

    rows = QueryBuilder().register("t", DeltaTable(str(table))).execute("select word, n from t")
    return [(row["word"], row["n"]) for row in pa.table(rows).to_pylist()]


def read_postgres(database: Database) -> list[tuple[str, int]]:
    """The Postgres table."""
    with psycopg.connect(database.conninfo) as connection:
        return [(word, n) for word, n in connection.execute("select word, n from word_counts")]


if __name__ == "__main__":
    sys.exit(main())
