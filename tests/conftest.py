"""What every test may use: a Postgres of the tests' own, fresh databases, one Spark session, a printed seed.

Helpers live in `tests/support/` and are imported as `from support.x import y` (`pythonpath` in pyproject.toml).
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pytest
from support import jvm
from support.brokers import left_out
from support.databases import fresh_database

from stormproof.core.base.failpoint import ENV_DRIVER_PID
from stormproof.core.postgres.database import Database
from stormproof.core.postgres.embedded import EmbeddedPostgres

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytest_plugins = [
    "support.fixtures",
    "support.brokers.kafka",
    "support.brokers.kafka_listeners",
    "support.brokers.kestrel_broker",
    "support.brokers.nats_server",
    "support.brokers.rabbitmq_server",
    "support.brokers.redis_server",
    "support.brokers.object_store",
]
# Else a case that fails shows no values.
pytest.register_assert_rewrite("stormproof.testing.sources", "stormproof.testing.states")

_SEED = pytest.StashKey[int]()
_ENDS = pytest.StashKey[list[str]]()
"""How Spark's JVMs ended that did not end as they should."""
_numbers = itertools.count(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run every test, and of the long files not a sample alone")
    parser.addoption("--drawn", type=int, default=None, metavar="N", help="run N of these tests, drawn by the seed")
    parser.addoption("--seed", type=int, default=None, help="seed of the tests' random choices (default: the commit's)")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # The tests own their Postgres: what the user's shell names is never touched, here and in child processes.
    for name in list(os.environ):
        if name.startswith(("STORMPROOF_", "PG")):
            del os.environ[name]
    os.environ[jvm.VARIABLE] = jvm.options()
    given: int | None = config.getoption("--seed")
    shared: dict[str, int] = getattr(config, "workerinput", {})  # a worker of pytest-xdist takes the run's seed
    config.stash[_SEED] = shared.get("seed", _seed_of_commit()) if given is None else given
    if config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = str(config.stash[_SEED])


def _seed_of_commit() -> int:
    """One seed for each state of the code: whoever runs the tests of a commit runs the sample that was run before it was
    pushed, and each commit draws another one. Outside a repository each run has a seed of its own.
    """
    asked = ["git", "-C", os.path.dirname(__file__), "rev-parse", "HEAD^{tree}"]
    with contextlib.suppress(FileNotFoundError):  # no git
        answer = subprocess.run(asked, capture_output=True, text=True, check=False)
        if answer.returncode == 0:
            return int(answer.stdout[:8], 16)
    return random.SystemRandom().randrange(2**32)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput["seed"] = node.config.stash[_SEED]


@pytest.hookimpl(tryfirst=True)  # pytest-xdist then reads the groups
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _sample(config, items)
    _draw(config, items)
    # One broker serves all tests on it: they stay in one worker. Spark's tests are too many for that: each worker has one.
    for item in items:
        if (mark := item.get_closest_marker("broker")) is not None:
            item.add_marker(pytest.mark.xdist_group(f"broker {mark.args[0]}"))


SHARES: Final = {"conformance": 0.04, "integration": 0.06, "property": 0.1}
"""The share of a folder's tests that a run takes, unless they are marked otherwise, or their file is named."""

OF_MARKED: Final = 0.5
"""The part of the marked shares that a run of all tests takes, so that it stays under 20 minutes on a slow machine."""


def _sample(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep a share of the tests that are marked `sampled`, and of those in slow folders, drawn by the run's seed; tests
    asked for by name stay.

    It is a share of each module's, so that each run takes about as long as the others. What is left over of a share (0.4 of
    a test) is taken as often as it says, so a run may leave a small module out. Tests that name a `pool` are drawn out of
    it: those that take half a minute each, in modules of one or two.
    """
    if config.getoption("--all") or config.option.keyword or any("::" in given for given in config.args):
        return
    rng = random.Random(config.stash[_SEED])
    is_named = any(given.endswith(".py") for given in config.args)
    shares = {} if is_named else SHARES
    marked: dict[tuple[str, float], list[pytest.Item]] = {}
    for item in items:
        mark, pool = item.get_closest_marker("sampled"), item.nodeid.partition("::")[0]
        share = (
            shares.get(item.path.parent.name, 1.0) if mark is None else mark.args[0] * (1.0 if is_named else OF_MARKED)
        )
        if mark is not None and not is_named:
            pool = mark.kwargs.get("pool", pool)
        if share < 1.0:
            marked.setdefault((pool, share), []).append(item)
    left_out = set[pytest.Item]()
    for (_, share), some in marked.items():
        left_out.update(rng.sample(some, len(some) - math.floor(len(some) * share + rng.random())))
    _leave_out(config, items, left_out)


def _draw(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep as many tests as were asked for; none of a pool, which take half a minute each."""
    number: int | None = config.getoption("--drawn")
    if number is None:
        return
    short = [item for item in items if not any("pool" in mark.kwargs for mark in item.iter_markers("sampled"))]
    drawn = random.Random(config.stash[_SEED]).sample(short, min(number, len(short)))
    _leave_out(config, items, set(items).difference(drawn))


def _leave_out(config: pytest.Config, items: list[pytest.Item], left_out: set[pytest.Item]) -> None:
    config.hook.pytest_deselected(items=[item for item in items if item in left_out])
    items[:] = [item for item in items if item not in left_out]


def pytest_runtest_teardown(item: pytest.Item) -> None:
    # A session of Spark that a test started by itself leaves this process's id here: a child of a later test that a
    # failpoint kills would kill the tests.
    os.environ.pop(ENV_DRIVER_PID, None)


def pytest_sessionfinish(session: pytest.Session) -> None:
    told: dict[str, object] = getattr(session.config, "workeroutput", {})  # of a worker of pytest-xdist
    told["ends"] = session.config.stash.get(_ENDS, [])


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    node.config.stash.setdefault(_ENDS, []).extend(getattr(node, "workeroutput", {}).get("ends", []))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    for end in terminalreporter.config.stash.get(_ENDS, []):
        terminalreporter.write_line(end)
    skipped = terminalreporter.stats.get("skipped", [])
    for line in left_out([str(report.longrepr[-1]) for report in skipped]):
        terminalreporter.write_line(line)


def pytest_unconfigure(config: pytest.Config) -> None:
    """Name what failed once more in the last lines, which is all that is kept of a long output."""
    reporter: Any = config.pluginmanager.get_plugin("terminalreporter")  # a worker of pytest-xdist has none
    if reporter is None:
        return
    bad = [f"{kind}: {report.nodeid}" for kind in ("failed", "error") for report in reporter.stats.get(kind, ())]
    for line in bad[:NAMED]:
        reporter.write_line(line)
    if len(bad) > NAMED:
        reporter.write_line(f"and {len(bad) - NAMED} more")


NAMED: Final = 30
"""How many of the tests that failed are named in the last lines."""


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.stash[_SEED]} (repeat with --seed={config.stash[_SEED]})"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The run's seed; shown with a test that fails."""
    value = request.config.stash[_SEED]
    request.node.add_report_section("setup", "seed", f"repeat with --seed={value}")
    return value


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test's working directory is a folder of its own.

    What names no folder is kept below the working directory. Tests that run at the same time in other workers give their
    topologies the same incarnation, so in one folder they would sweep each other's files.
    """
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """The session's own embedded Postgres, running; `.database`. A test that restarts a server takes `server`."""
    with _running(tmp_path_factory) as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedPostgres]:
    """A Postgres of the module's own, which its tests may restart: `.restart(immediate=True)` is a crash."""
    with _running(tmp_path_factory) as server:
        yield server


@contextlib.contextmanager
def _running(tmp_path_factory: pytest.TempPathFactory) -> Generator[EmbeddedPostgres]:
    server = EmbeddedPostgres(tmp_path_factory.mktemp("pg"))
    server.acquire()
    yield server
    server.release()


@pytest.fixture
def database(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """A fresh, empty database, dropped afterwards."""
    with fresh_database(postgres.database, f"test_{next(_numbers)}") as fresh:
        yield fresh


@pytest.fixture(scope="session")
def spark(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    """The session's one Spark session: local, two cores, a failed task is tried again."""
    from stormproof.core.engine.spark import spark_session
    from stormproof.core.start.settings import Settings

    folder = tmp_path_factory.mktemp("spark")
    with contextlib.chdir(folder):  # the JVM's working directory outlives the test that needs it first
        session = spark_session(Settings(master="local[2,4]", home=folder))
    # Spark's workers have it from the JVM. Other children of this process must not take it for theirs: a failpoint that
    # kills in one of them would kill the tests.
    os.environ.pop(ENV_DRIVER_PID, None)
    yield session
    # A JVM that is gone fails the tests that need it. When there are none left, it is told, and fails nothing.
    told = jvm.stop(session, folder)
    if told is not None:
        request.config.stash.setdefault(_ENDS, []).append(told)
