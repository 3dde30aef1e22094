"""`topology.run()` in a program of one's own: signals and an event end it in order, and a second signal at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import HTTPCookieProcessor, build_opener

import psutil
import pytest
from pyspark.sql import SparkSession
from support.queues import prepared_database, put

from stormproof import PostgresQueue, PostgresSink, Topology
from stormproof.core.engine.spark import SparkEngine
from stormproof.core.postgres.database import Database, connect
from stormproof.core.start.settings import Settings
from stormproof.trident.driver import control_line
from stormproof.trident.driver.run import EngineChoice
from stormproof.trident.terms.observers import RunStatistics

pytestmark = pytest.mark.postgres

FIRST, OTHER = b"a", b"b"
SIGNALS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["SIGINT", "SIGTERM"])


class Program:
    """A topology whose function does something at the first message, in batches of one."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database = database
        put(prepared_database(database), "words", [FIRST, OTHER])
        self.settings = Settings(database_url=database.adbc_uri, staging_dir=str(folder), batch_messages=1)

    def run(
        self, at_first: Callable[[], None], engine: EngineChoice = "inline", stop: threading.Event | None = None
    ) -> RunStatistics:
        def work(word: str) -> str:
            if word == "a":
                at_first()
            return word

        topology = Topology("words")
        queue = PostgresQueue("words", schema="word string", database=self.database)
        topology.stream("words", queue).map(work, "word", schema="word string").into(
            PostgresSink("words", database=self.database)
        )
        return topology.run(
            engine=engine,
            settings=self.settings,
            until_idle=True,
            stop=stop,
            on_batch=lambda _: None if stop is None else stop.set(),
        )

    @property
    def written(self) -> list[str]:
        with connect(self.database, application_name="tests") as connection:
            return sorted(word for (word,) in connection.execute("select word from words").fetchall())


@pytest.fixture
def program(database: Database, tmp_path: Path) -> Program:
    return Program(database, tmp_path)


@contextmanager
def handled(number: int, handler: object) -> Generator[None]:
    before = signal.signal(number, handler)  # type: ignore[arg-type]
    try:
        yield
        assert signal.getsignal(number) is handler
    finally:
        signal.signal(number, before)


def nothing() -> None: ...


@SIGNALS
def test_a_signal_ends_a_run_after_its_batch_and_the_handler_is_put_back(program: Program, number: int) -> None:
    with handled(number, lambda *_: pytest.fail("the run handles it")):
        found = program.run(lambda: os.kill(os.getpid(), number))
    assert (found.stopped, found.messages, program.written) == ("signal", 1, ["a"])
    assert (program.run(nothing).messages, program.written) == (1, ["a", "b"])


def test_an_event_ends_a_run_after_its_batch_also_outside_the_main_thread(program: Program) -> None:
    stop, found = threading.Event(), list[RunStatistics]()
    thread = threading.Thread(target=lambda: found.append(program.run(nothing, stop=stop)))
    thread.start()
    thread.join()
    assert [(one.stopped, one.messages) for one in found] == [("event", 1)]
    assert program.written == ["a"]


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Generator[Path]:
    """What this process says of signals, where others can read it. Two signals are two here, however close they come."""
    os.mkfifo(tmp_path / "told")
    end = os.open(tmp_path / "told", os.O_RDWR)
    monkeypatch.setattr(control_line, "_STDERR", end)
    monkeypatch.setattr(control_line, "ONE_SIGNAL_S", 0.0)
    yield tmp_path / "told"
    os.close(end)


def twice(process: int, number: int, told: Path, then: Callable[[], object]) -> Callable[[], None]:
    def send() -> None:
        os.kill(process, number)
        with told.open() as said:
            assert "once more" in said.readline()
        os.kill(process, number)
        then()

    return send


@pytest.mark.parametrize(
    ("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)], ids=["SIGINT", "SIGTERM"]
)
def test_a_second_signal_ends_a_run_at_once_and_nothing_is_written(
    program: Program, told: Path, number: int, error: type[BaseException]
) -> None:
    calls: list[int] = []
    with handled(signal.SIGTERM, lambda *_: calls.append(1)), pytest.raises(error):
        program.run(twice(os.getpid(), number, told, nothing))
    assert calls == [1] * (number == signal.SIGTERM)
    assert (program.run(nothing).messages, program.written) == (2, ["a", "b"])


@pytest.mark.spark
@pytest.mark.timeout(120)
def test_a_second_signal_does_not_wait_for_spark_whose_answers_stay_in_order(
    program: Program, told: Path, spark: SparkSession
) -> None:
    driver, began_s = os.getpid(), time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        program.run(twice(driver, signal.SIGINT, told, lambda: time.sleep(60)), engine=SparkEngine(spark, 2))
    assert time.monotonic() - began_s < 30
    assert [spark.range(number).count() for number in range(5)] == [0, 1, 2, 3, 4]
    assert (program.run(nothing, engine=SparkEngine(spark, 2)).messages, program.written) == (2, ["a", "b"])


def test_a_second_sigterm_ends_a_process_without_a_handler_of_its_own() -> None:
    code = """
        import os, signal
        from stormproof.trident.driver.control_line import Stopping
        with Stopping(iter([0.0, 9.0]).__next__):
            os.kill(os.getpid(), signal.SIGTERM)
            print("goes on", flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            print("still here")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "goes on\n")


@pytest.mark.timeout(120)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name)
def test_the_embedded_postgres_ends_with_the_page_that_used_it_last(tmp_path: Path, number: signal.Signals) -> None:
    call = [sys.executable, "-m", "stormproof", "web", "--port", "0", "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("STORMPROOF_")}
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True, cwd=tmp_path, env=environment) as page:
        try:
            assert page.stdout is not None
            served = json.loads(page.stdout.readline())
            browser = build_opener(HTTPCookieProcessor())
            for url in (served["url"], served["address"]):  # the server starts with the first view of the ledger
                with browser.open(url, timeout=60) as answer:
                    assert answer.status == 200
            server = int((tmp_path / ".stormproof/postgres/data/postmaster.pid").read_text().splitlines()[0])
            assert psutil.pid_exists(server)
            page.send_signal(number)
            assert page.wait(60) == 130
            assert not psutil.pid_exists(server)
        finally:
            page.kill()
