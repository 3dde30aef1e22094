"""The faults of the environment that are tried, one row each: see `support.fault_stand`."""

from __future__ import annotations

import re
import signal
from dataclasses import replace
from functools import partial

from support.fault_causes import (
    altered,
    as_app,
    broken_trigger,
    connections_used_up,
    database_setting,
    encoded,
    few_files,
    file_in_place_of,
    file_unreadable,
    full_disk,
    in_file,
    locked_table,
    log_unreadable,
    move_away,
    moved_back,
    no_inodes,
    no_java,
    no_right_to_write,
    not_allowed_in,
    old_java,
    others_schema,
    read_only_disk,
    renamed_database,
    retry,
    role_without_rights,
    running_again,
    shift_clock,
    spark_defaults,
    take_over,
    taken_port,
    with_defaults,
)
from support.fault_stand import Fault, end_backends, obey_modes


def faults() -> list[Fault]:
    """All of them."""
    return [*_disks(), *_rights(), *_databases(), *_processes(), *_files(), *_java()]


_HEAD = """# Faults of the environment

What a run says when something around it is broken, its exit status, and how it goes on. None of these makes a message
count a failure. Errors of other kinds are in [runbook.md](runbook.md).

Made by `tools/faults_doc.py` from the faults that the tests cause: do not edit.

## What ends a run

The fault, its message on standard error, and the remedy; then start again. `...` stands for what differs: a path, a
name, a position.
"""
_TABLE = """
### Exit status {status}

"""
_ADVICE = re.compile(
    r"(?:\.{3}|[.;,])? ?(?:What to do: |Repair the (?:cause|table)|see what is wrong with: |check (?:that|with)|"
    r"repair it, and|install (?:one|it)|fetch them with: |Make one, and|As its owner run: |Stormproof needs UTF8|"
    r"Name the primary).*"
)
"""What a message says of the remedy, which has a column of its own."""
_GOES_ON = """
## What does not end it

"""


def page() -> str:
    """docs/faults.md."""
    seen, unseen = _merged([one for one in faults() if one.status]), [one for one in faults() if not one.status]
    return (
        _HEAD
        + "".join(_with_status(status, seen) for status in dict.fromkeys(one.status for one in seen))
        + _GOES_ON
        + "".join(f"- {one.name}{'' if 'nothing' in one.goes_on else f': {one.goes_on}'}\n" for one in unseen)
    )


def _with_status(status: int, seen: list[Fault]) -> str:
    rows = (one for one in seen if one.status == status)
    lines = (f"- {one.name}: {_cell(one.says)} {_remedy(one.goes_on)}\n" for one in rows)
    return _TABLE.format(status=_status(status)) + "".join(lines)


def _merged(all_of_them: list[Fault]) -> list[Fault]:
    """One row for what is alike in the folder of staging and in that of the Delta tables."""
    rows: dict[tuple[str, str], Fault] = {}
    for fault in all_of_them:
        says = fault.says.replace("the folder of sink 'appended' (...)", "...").replace(
            "the staging folder (...)", "..."
        )
        key = fault.name.replace("the Delta tables", "staging"), says
        both = key in rows
        name = fault.name.replace("the Delta tables", "staging, or of the Delta tables,") if both else fault.name
        rows[key] = replace(fault, name=name.rstrip(","), says=says if both else fault.says)
    return list(rows.values())


def _cell(says: str) -> str:
    short = _ADVICE.sub("...", says.replace(NOBODY_TO_BLAME, "...What to do: "))
    short = re.sub(r"[.]{4,}", "...", short)
    return f"`{short}`;" if says else "no message;"


def _remedy(goes_on: str) -> str:
    return goes_on.removesuffix("start again").rstrip(", ") or "start again"


def _status(status: int) -> str:
    return str(status) if status >= 0 else signal.Signals(-status).name


NOBODY_TO_BLAME = "No message is to blame, none counts a failure, and nothing is half written. What to do: "


def _disks() -> list[Fault]:
    return [
        *_disks_of("staging", "home/staging", "the staging folder (...)"),
        *_disks_of("the Delta tables", "lake", "the folder of sink 'appended' (...)"),
        Fault(
            "a file stands where the folder of staging belongs",
            "sink 'folded', the folder for its files: FileExistsError: [Errno 17] File exists: ...",
            before=partial(file_in_place_of, folder="home/staging"),
            goes_on="move it away, start again",
        ),
        Fault(
            "a file stands where the folder of the Delta tables belongs",
            "sink 'appended' (...): [Errno 20] Not a directory: ...; nothing was written",
            before=partial(file_in_place_of, folder="lake"),
            goes_on="move it away, start again",
        ),
        Fault(
            "the folder of staging goes while a job runs",
            "",
            status=0,
            before=partial(moved_back, folder="home/staging"),
            at="run.after",
            then=partial(move_away, folder="home/staging"),
            goes_on="by itself: the folder is made, the batch runs again",
        ),
        Fault(
            "the folder of the Delta tables goes while a job runs",
            "sink 'appended' (...): the table is gone: ...",
            before=partial(moved_back, folder="lake"),
            at="run.after",
            then=partial(move_away, folder="lake"),
            goes_on="bring it back, start again",
        ),
        Fault(
            "the folder of staging goes once a batch is prepared",
            "txid 2 of topology 'orders' is blocked: ... prepared files are not as prepared: ... is missing; ..."
            "Repair the cause, then: stormproof retry orders 2; ...",
            before=partial(moved_back, folder="home/staging"),
            at="prepare.after",
            then=partial(move_away, folder="home/staging"),
            repaired_by=retry,
            goes_on="bring it back, `stormproof retry`, start again",
        ),
        Fault(
            "the folder of the Delta tables goes once a batch is prepared",
            "txid 2 of topology 'orders' is blocked: sink 'appended' (...): the table is gone: ...Repair the cause, then: "
            "stormproof retry orders 2; ...",
            before=partial(moved_back, folder="lake"),
            at="prepare.after",
            then=partial(move_away, folder="lake"),
            repaired_by=retry,
            goes_on="bring it back, `stormproof retry`, start again",
        ),
        Fault(
            "too few file descriptors (ulimit -n)",
            "sink 'appended' (...): the table cannot be opened: ...Too many open files...",
            inside=[partial(few_files, 6)],
            goes_on="raise the limit, start again",
        ),
        Fault(
            "there is no folder for temporary files",
            "",
            status=0,
            environment={"TMPDIR": "/nonexistent"},
            goes_on="nothing to do",
        ),
    ]


def _disks_of(what: str, folder: str, shown: str) -> list[Fault]:
    lacks = f"{shown}: ... lacks what a run needs: "
    return [
        Fault(
            f"the disk of {what} is full",
            f"{lacks}...No space left on device...{NOBODY_TO_BLAME}make room on that disk",
            before=partial(full_disk, folder=folder),
            goes_on="make room, start again",
        ),
        Fault(
            f"the disk of {what} has no inode left",
            f"{lacks}...No space left on device...{NOBODY_TO_BLAME}make room on that disk",
            before=partial(no_inodes, folder=folder),
            goes_on="make room, start again",
        ),
        Fault(
            f"the disk of {what} is read-only",
            f"{lacks}...Read-only file system...{NOBODY_TO_BLAME}mount it for writing, or name another folder",
            before=partial(read_only_disk, folder=folder),
            goes_on="mount it for writing, start again",
        ),
        Fault(
            f"no right to write the folder of {what}",
            f"{lacks}...Permission denied...{NOBODY_TO_BLAME}"
            "grant the user who runs the executors the right to write there, or name another folder",
            before=partial(no_right_to_write, folder=folder),
            inside=[obey_modes],
            goes_on="grant the right, start again",
        ),
    ]


def _rights() -> list[Fault]:
    return [
        Fault(
            "the log of a Delta table may not be read",
            "sink 'appended' (...): the table cannot be opened: [Errno 13] Permission denied: ...",
            before=log_unreadable,
            inside=[obey_modes],
            goes_on="give the right, start again",
        ),
        Fault(
            "the file with the topology may not be read",
            "orders.py: PermissionError: [Errno 13] Permission denied: ..., raised while the file was loaded; ...",
            status=2,
            before=file_unreadable,
            inside=[obey_modes],
            goes_on="give the right, start again",
        ),
    ]


def _databases() -> list[Fault]:
    return [
        Fault(
            "nobody listens at the database's address",
            "no connection to Postgres at ...Connection refused; check that the server runs there and that "
            "STORMPROOF_DATABASE_URL (or the PG* variables) names it; see what is wrong with: stormproof doctor",
            environment={"STORMPROOF_DATABASE_URL": f"postgresql://postgres@127.0.0.1:{taken_port()}/postgres"},
            goes_on="start it, start again",
        ),
        Fault(
            "the database's host is unknown",
            "no connection to Postgres at ...failed to resolve host 'nowhere.invalid'...; see what is wrong with: "
            "stormproof doctor",
            environment={"STORMPROOF_DATABASE_URL": "postgresql://postgres@nowhere.invalid/postgres"},
            goes_on="repair the name, start again",
        ),
        Fault(
            "the role has no connection left",
            "no connection to Postgres at ...too many connections for role ...; see what is wrong with: "
            "stormproof doctor",
            before=connections_used_up,
            variables=as_app,
            goes_on="raise the limit, start again",
        ),
        Fault(
            "the role has no rights",
            "the ledger at ...: role ... has no right to USAGE on schema stormproof. As its owner run: GRANT "
            "USAGE ON SCHEMA stormproof TO ...; (stormproof ledger sql --grants ROLE prints all that a role "
            "needs)",
            before=role_without_rights,
            variables=as_app,
            goes_on="grant them, start again",
        ),
        *(
            Fault(
                f"the database is {encoding}",
                f"the database ... has encoding {encoding}; Stormproof needs UTF8, since other encodings cannot hold "
                "every message. Make one, and name it instead: ...",
                status=2,
                before=partial(encoded, encoding=encoding),
                goes_on="name a database in UTF8, start again",
            )
            for encoding in ("LATIN1", "SQL_ASCII")
        ),
        Fault(
            "the database is not there",
            "no connection to Postgres at ...database ... does not exist; ...; see what is wrong with: stormproof "
            "doctor",
            before=renamed_database,
            goes_on="restore it, start again",
        ),
        Fault(
            "the database takes no connections",
            "no connection to Postgres at ...is not currently accepting connections; ...; see what is wrong with: "
            "stormproof doctor",
            before=not_allowed_in,
            goes_on="start again",
        ),
        Fault(
            "Postgres is restarted in mid-run",
            "",
            status=0,
            at="run.after",
            then=lambda place: place.server.restart(immediate=True),
            goes_on="by itself",
        ),
        Fault(
            "Postgres goes in mid-run and stays away",
            "no connection to Postgres at ...; see what is wrong with: stormproof doctor",
            before=running_again,
            at="run.after",
            then=lambda place: place.server.stop("immediate"),
            goes_on="start it, start again",
        ),
        Fault(
            "all connections are ended in mid-run",
            "",
            status=0,
            at="run.after",
            then=end_backends,
            goes_on="by itself",
        ),
        Fault(
            "the database is read-only by default",
            "the ledger at ...: the server takes no writes: it is a standby, or default_transaction_read_only is "
            "on for it, for the database or for the role. Name the primary in STORMPROOF_DATABASE_URL; ...",
            before=partial(database_setting, setting="default_transaction_read_only=on"),
            goes_on="lift it, start again",
        ),
        Fault(
            "statements may take a millisecond by default",
            "",
            status=0,
            before=partial(database_setting, setting="statement_timeout='1ms'"),
            goes_on="nothing to do",
        ),
        Fault(
            "transactions are serializable by default",
            "",
            status=0,
            before=partial(database_setting, setting="default_transaction_isolation=serializable"),
            goes_on="nothing to do",
        ),
        Fault(
            "commits are not waited for by default",
            "",
            status=0,
            before=partial(database_setting, setting="synchronous_commit=off"),
            goes_on="nothing to do",
        ),
        Fault(
            "the search path names no schema",
            "topology 'orders' cannot start: sink 'folded' (...): Postgres refuses it, and nothing was written: "
            "no schema has been selected to create in. ...",
            status=1,
            before=partial(database_setting, setting="search_path=''"),
            goes_on="repair it, start again",
        ),
        Fault(
            "the schema is of another version",
            "the database ... has schema revision 9999...",
            status=2,
            before=others_schema,
            goes_on="run that version, or begin anew",
        ),
        Fault(
            "the sink's table is locked by somebody",
            "sink 'folded' (...): canceling statement due to lock timeout. Locked now: counts by ...",
            before=locked_table,
            slow=True,
            goes_on="end the other transaction, start again",
        ),
        Fault(
            "the sink's table has lost a column",
            "topology 'orders' cannot start: sink 'folded' (...): the table has no column 'n'. Nothing was "
            "written. Repair the table and start again ...",
            before=partial(
                altered,
                do="alter table counts rename column n to other",
                undo="alter table counts rename column other to n",
            ),
            goes_on="repair the table, start again",
        ),
        Fault(
            "a trigger of the sink's table sets a column that is gone",
            'txid 2 of topology \'orders\' is blocked: ...record "new" has no field "gone"...Repair the cause, then: '
            "stormproof retry orders 2; ...",
            before=broken_trigger,
            repaired_by=retry,
            goes_on="repair the table, `stormproof retry`, start again",
        ),
    ]


def _processes() -> list[Fault]:
    return [
        Fault(
            "the driver is killed",
            "",
            status=-signal.SIGKILL,
            environment={"STORMPROOF_FAILPOINT": "prepare.after=kill@2"},
            goes_on="start again",
        ),
        Fault(
            "the driver's clock is a year behind",
            "",
            status=0,
            inside=[partial(shift_clock, -365)],
            goes_on="nothing to do",
        ),
        Fault(
            "the driver's clock is a year ahead",
            "",
            status=0,
            inside=[partial(shift_clock, 365)],
            goes_on="nothing to do",
        ),
        Fault(
            "another driver takes over",
            "topology 'orders' is run by ... with epoch 2 now; this driver's epoch 1 is over and it stops",
            status=3,
            at="run.after",
            then=take_over,
            goes_on="nothing to do: the other one goes on",
        ),
        Fault(
            "the locale is C, with ASCII",
            "",
            status=0,
            environment={"LC_ALL": "C", "LANG": "C", "PYTHONUTF8": "0"},
            goes_on="nothing to do",
        ),
        Fault(
            "there is no home directory", "", status=0, environment={"HOME": "/nonexistent"}, goes_on="nothing to do"
        ),
    ]


def _files() -> list[Fault]:
    return [
        Fault(
            "the topology's file has a syntax error",
            "orders.py, line 17: invalid syntax: def broken(:; repair it, and try again",
            status=2,
            before=partial(in_file, name="orders.py", text="\ndef broken(:\n"),
            goes_on="repair the file",
        ),
        Fault(
            "the topology's file imports a module that is not there",
            "orders.py, line 17: ModuleNotFoundError: No module named 'nowhere_to_be_found'; install it for ..., "
            "or put it beside the file",
            status=2,
            before=partial(in_file, name="orders.py", text="\nimport nowhere_to_be_found\n"),
            goes_on="install it",
        ),
        Fault(
            "the topology's file raises",
            "orders.py, line 17: RuntimeError: no such thing, raised while the file was loaded; ...",
            status=2,
            before=partial(in_file, name="orders.py", text="\nraise RuntimeError('no such thing')\n"),
            goes_on="repair the file",
        ),
        Fault(
            "stormproof.toml is no TOML",
            "stormproof.toml is not TOML: Invalid value (at line 1, column 12)",
            status=2,
            before=partial(in_file, name="stormproof.toml", text="outage_s = = 3"),
            goes_on="repair the file",
        ),
        Fault(
            "stormproof.toml has an unknown key",
            "unknown key in ...stormproof.toml: 'outage'; known: batch_bytes, ...",
            status=2,
            before=partial(in_file, name="stormproof.toml", text="outage = 3"),
            goes_on="repair the file",
        ),
        Fault(
            "a setting's value cannot be",
            "variable STORMPROOF_OUTAGE_S: Input should be a valid number, ...",
            status=2,
            environment={"STORMPROOF_OUTAGE_S": "soon"},
            goes_on="repair the setting",
        ),
        Fault(
            "a variable is mistyped",
            "unknown variable STORMPROOF_OUTAGES; known: STORMPROOF_BATCH_BYTES, ...",
            status=2,
            environment={"STORMPROOF_OUTAGES": "3"},
            goes_on="repair the setting",
        ),
    ]


ON_SPARK = ("run", "orders.py:topology", "--until-idle")


def _java() -> list[Fault]:
    return [
        Fault(
            "there is no Java",
            "no Java for Spark (it takes 17, 21, 25); seen: none; install one with: ...",
            status=2,
            arguments=ON_SPARK,
            inside=[no_java],
            environment={"PATH": "/nonexistent", "JAVA_HOME": None},
            goes_on="install one, start again",
        ),
        Fault(
            "JAVA_HOME names nothing, and there is no other Java",
            "no Java for Spark (it takes 17, 21, 25); seen: JAVA_HOME: ... does not run; install one with: ...",
            status=2,
            arguments=ON_SPARK,
            inside=[no_java],
            environment={"PATH": "/nonexistent", "JAVA_HOME": "/nonexistent"},
            goes_on="repair it, start again",
        ),
        Fault(
            "the only Java is too old",
            "no Java for Spark (it takes 17, 21, 25); seen: PATH: ... is Java 11; install one with: ...",
            status=2,
            arguments=ON_SPARK,
            before=old_java,
            inside=[no_java],
            variables=lambda place: {"PATH": f"{place.folder / 'bin'}:/usr/bin:/bin", "JAVA_HOME": None},
            goes_on="install another, start again",
        ),
        Fault(
            "Delta's jars are not there",
            "Delta's jars are not there (/nonexistent: no such folder); fetch them with: ...",
            status=2,
            arguments=ON_SPARK,
            environment={"STORMPROOF_DELTA_JARS_DIR": "/nonexistent"},
            goes_on="`stormproof jars`, start again",
        ),
        Fault(
            "PYSPARK_PYTHON names no Python",
            "",
            status=0,
            arguments=ON_SPARK,
            environment={"PYSPARK_PYTHON": "/nonexistent/python"},
            slow=True,
            goes_on="nothing to do: workers run the driver's Python",
        ),
        Fault(
            "the port of Spark's driver is taken",
            "Spark does not start on ...Address already in use...",
            status=2,
            arguments=ON_SPARK,
            before=partial(spark_defaults, lines={"spark.driver.port": "{listening}", "spark.port.maxRetries": "0"}),
            variables=with_defaults,
            slow=True,
            goes_on="free it, start again",
        ),
        Fault(
            "the port of Spark's page is taken",
            "",
            status=0,
            arguments=ON_SPARK,
            before=partial(spark_defaults, lines={"spark.ui.port": "{listening}"}),
            variables=with_defaults,
            slow=True,
            goes_on="nothing to do",
        ),
        Fault(
            "the disk of Spark's own files is full",
            "Spark does not start on ...No space left on device; check with: stormproof doctor",
            status=2,
            arguments=ON_SPARK,
            before=partial(full_disk, folder="spark"),
            variables=lambda place: {"SPARK_LOCAL_DIRS": str(place.folder / "spark")},
            slow=True,
            goes_on="make room, start again",
        ),
    ]
