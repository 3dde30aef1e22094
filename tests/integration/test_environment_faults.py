"""A table: faults of the environment x what a run says, its exit status, whom it blames (nobody), and how it goes on.

A further fault is one row. Each row is a driver with the fault, then one without: the second takes every message, once.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from support import environment as e
from support import plain_session
from support.queues import prepared_database, put
from support.verdicts import verified

from stormproof.core.base.errors import ErrorKind
from stormproof.core.postgres.database import Database
from stormproof.trident.cli.output import Exit

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.25)]


@dataclass(frozen=True, slots=True)
class Row:
    """What a run does that meets a fault. `says` are parts of its one line; `status` is its exit status."""

    fault: e.Fault
    says: tuple[str, ...]
    status: Exit = Exit.FAILED


def staging(arrange: Callable[[Path], None]) -> Callable[[e.Site], None]:
    return functools.partial(_at_staging, arrange)


def _at_staging(arrange: Callable[[Path], None], site: e.Site) -> None:
    arrange(site.staging)


def table(arrange: Callable[[Path], None]) -> Callable[[e.Site], None]:
    return functools.partial(_at_table, arrange)


def _at_table(arrange: Callable[[Path], None], site: e.Site) -> None:
    arrange(site.table)


ROWS = [
    Row(
        e.Fault("the staging disk is full", always=staging(e.full_disk), may=e.no_mounts),
        ("the staging folder (", "No space left on device", "make room on that disk"),
    ),
    Row(
        e.Fault("the staging disk is too small", always=staging(e.small_disk), may=e.no_mounts),
        ("No space left on device", "make room on that disk"),
    ),
    Row(
        e.Fault("the staging disk is read-only", always=staging(e.read_only_disk), may=e.no_mounts),
        ("Read-only file system", "mount it for writing"),
    ),
    Row(
        e.Fault("no right to write to the staging folder", always=staging(e.no_right)),
        ("Permission denied", "the right to write there"),
    ),
    Row(
        e.Fault("no right to write to the table's folder", later=table(e.no_right)),
        ("Permission denied", "the right to write there"),
    ),
    Row(
        e.Fault("a quota is met while it runs", later=e.small_files),
        ("File too large", "ulimit -f"),
    ),
    Row(
        e.Fault("no more file handles", later=e.few_handles),
        ("Too many open files", "ulimit -n"),
    ),
    Row(
        e.Fault("a module that only the driver has", function=e.NotThere),
        ("No module named 'a_module_that_only_the_driver_has'", "install 'a_module_that_only_the_driver_has'"),
    ),
    Row(
        e.Fault("a function that cannot be unpickled", function=e.Unreadable),
        ("AttributeError: state of version 2", "cannot be unpickled"),
    ),
    Row(
        e.Fault("the staging folder is removed while it runs", later=staging(e.removed)),
        (),
        Exit.DONE,
    ),
]


@pytest.mark.spark(own=True)
@pytest.mark.timeout(150)
def test_a_notebook_whose_workers_lack_the_package_is_told_what_to_do(site: e.Site) -> None:
    """A session that the user made first: its workers run another Python."""
    url = site.database.sqlalchemy_url.render_as_string(hide_password=False)
    worker = plain_session.python_without_the_package(site.folder / "python")
    command = [sys.executable, plain_session.__file__, str(site.folder), url, str(worker)]
    environment = {k: v for k, v in os.environ.items() if k not in ("PYSPARK_PYTHON", "PYTHONPATH")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    refused: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    assert refused["kind"] == ErrorKind.MACHINE_UNFIT.value, refused
    for part in ("No module named 'stormproof'", "spark.executorEnv.PYTHONPATH", "No message is to blame"):
        assert part in refused["message"]
    assert not e.blamed(site)
    assert e.run_driver(site) == Exit.DONE
    require_exact(site)


@pytest.fixture
def site(tmp_path: Path, database: Database) -> e.Site:
    put(prepared_database(database), e.QUEUE, e.payloads())
    return e.Site(tmp_path, database)


def require_exact(site: e.Site) -> None:
    should = Counter(payload.decode() for payload in e.payloads())
    assert e.held(site) == (should, should)
    report = verified("kept", site.database)
    assert not report.violations, [violation.text for violation in report.violations]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.fault.name)
def test_no_message_is_blamed_and_the_run_goes_on(site: e.Site, row: Row) -> None:
    why_not = row.fault.may()
    if why_not is not None:
        pytest.skip(why_not)
    status = e.run_driver(site, row.fault)
    said = site.said.read_text()
    assert status == row.status, said
    for part in row.says:
        assert part in said
    assert "unexpected error" not in said
    assert len(said.splitlines()) <= 1
    assert not e.blamed(site)
    for folder in (site.table, site.staging):
        if folder.exists():
            folder.chmod(0o755)
    assert e.run_driver(site) == Exit.DONE, site.said.read_text()
    require_exact(site)
    assert not e.blamed(site)
