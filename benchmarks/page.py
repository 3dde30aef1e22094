"""P17: what the page costs when it is open in 20 tabs, over a ledger with 100 topologies."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import AbstractContextManager, contextmanager
from http.client import HTTPConnection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import psutil

from benchmarks.batches import SMALL
from benchmarks.corpus import sentences
from benchmarks.figures import Goal, Unit
from benchmarks.harness import Case
from benchmarks.word_count import word_count
from benchmarks.workbench import Workbench
from stormproof.core.base.message import Guarantee
from stormproof.core.source.postgres_queue import PostgresQueue
from stormproof.sinks.delta.sink import DeltaSink

TABS: Final = 20
TOPOLOGIES: Final = 100
POLL_S: Final = 5.0
"""The page's own."""
RUN_S: Final = 15.0
"""How long a run takes: three polls of each tab."""
CORE_SHARE: Final = 0.05
"""Of a core, for the ledger."""
MACHINE_SHARE: Final = 0.02
"""Of all cores, for the page: what it takes of a driver beside it that uses them all."""

_FILL: Final = """
insert into stormproof.topology
select 'topology-' || t, 'topology-' || t || '/1', 1, 'f', 'exactly-once', 'shop', now() - interval '30 days', now(), 'host',
  1, 1, now()
from generate_series(1, {topologies}) t;
insert into stormproof.topology_sink
select 'topology-' || t || '/1', 'pg', 'table ' || t, 'id ' || t, null, now() from generate_series(1, {topologies}) t;
insert into stormproof.txn (incarnation, txid, state, guarantee, epoch, attempt, source, position, messages, tuples, bytes,
  retry, opened_at, prepared_at, ended_at, steps_ms)
select 'topology-' || t || '/1', g, 'committed', 'exactly-once', 1, 1, 'shop', '{{}}', 100, 1000, 100000, false,
  now() - (1000 - g) * interval '25 seconds', now() - (1000 - g) * interval '25 seconds' + interval '1 second',
  now() - (1000 - g) * interval '25 seconds' + interval '2 seconds', '{{"job": 800.5, "total": 925.0}}'
from generate_series(1, {topologies}) t, generate_series(1, 1000) g;
insert into stormproof.txn_sink (incarnation, txid, sink, previous, rows, bytes, digest, files, committed_at, outcome)
select 'topology-' || t || '/1', g, 'pg', nullif(g - 1, 0), 1000, 100000, md5(cast(g as text)), '[]', now(), 'applied'
from generate_series(1, {topologies}) t, generate_series(1, 1000) g;
analyze;
"""


class Tabs:
    """Browsers' tabs with the overview open, in a process of their own: each asks at the page's own rate.

    Each time over another connection: the server closes one that was idle for as long as that, and browsers connect anew.
    """

    def __init__(self, address: str, cookie: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._open, self._ended = context.Event(), context.Event()
        self._counts = context.Array("L", 2)
        given = (address, cookie, self._open, self._ended, self._counts)
        self._process = context.Process(target=_browse, args=given, daemon=True)
        self._process.start()

    @property
    def answers(self) -> int:
        """Polls that were answered."""
        return int(self._counts[0])

    @property
    def failed(self) -> int:
        """Polls that were not."""
        return int(self._counts[1])

    @contextmanager
    def open(self) -> Generator[None]:
        """The tabs are in view meanwhile."""
        self._open.set()
        try:
            yield
        finally:
            self._open.clear()

    def close(self) -> None:
        """Close them."""
        self._ended.set()
        self._open.set()
        self._process.join(POLL_S * 2)


def _browse(address: str, cookie: str, is_open: Event, ended: Event, counts: Any) -> None:
    """The tabs' process."""
    place = urlsplit(address)

    def tab(offset_s: float) -> None:
        assert place.hostname is not None
        ended.wait(offset_s)
        while not ended.is_set():
            is_open.wait()
            if ended.is_set():
                break
            connection = HTTPConnection(place.hostname, place.port, timeout=60)
            try:
                connection.request("GET", "/", headers={"Cookie": cookie, "HX-Request": "true"})
                answer = connection.getresponse()
                found = answer.read()
                good = answer.status == 200 and f"topology-{TOPOLOGIES}".encode() in found
            except OSError:
                good = False
            finally:
                connection.close()
            with counts.get_lock():
                counts[0 if good else 1] += 1
            ended.wait(POLL_S)

    threads = [threading.Thread(target=tab, args=(number * POLL_S / TABS,)) for number in range(TABS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@contextmanager
def _page(bench: Workbench) -> Generator[tuple[Tabs, psutil.Process]]:
    """The tabs, and the process of `stormproof web`."""
    words = [sys.executable, "-m", "stormproof", "web", "--port", "0", "--json"]
    settings = {"STORMPROOF_DATABASE_URL": bench.database.adbc_uri}
    with subprocess.Popen(words, env={**os.environ, **settings}, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            served = json.loads(server.stdout.readline())
            place = urlsplit(served["url"])
            assert place.hostname is not None
            connection = HTTPConnection(place.hostname, place.port)
            connection.request("GET", f"{place.path}?{place.query}")
            answer = connection.getresponse()
            answer.read()
            cookie = answer.headers["Set-Cookie"].partition(";")[0]
            connection.close()
            tabs = Tabs(served["address"], cookie)
            try:
                yield tabs, psutil.Process(server.pid)
            finally:
                tabs.close()
            if tabs.failed or not tabs.answers:
                raise RuntimeError(f"{tabs.failed} of {tabs.failed + tabs.answers} polls of the page failed")
        finally:
            server.terminate()


def _fill(bench: Workbench) -> None:
    with bench.connect() as connection:
        connection.execute(_FILL.format(topologies=TOPOLOGIES).encode())


@contextmanager
def driver_with_tabs(bench: Workbench) -> Generator[Case]:
    """Messages a second of a driver, with the tabs open and without."""
    payloads = [line.encode() for line in sentences(SMALL).to_pylist()]
    queue = PostgresQueue(bench.unused("queue"), "line string", database=bench.database)
    topology = word_count(bench.unused("count"), queue, DeltaSink(bench.path("counts")))
    with bench.stepping(topology, Guarantee.EXACTLY_ONCE, SMALL) as stepper, _page(bench) as (tabs, _):

        def rate() -> float:
            queue.put(payloads)
            stepper.seconds()  # the first one after a pause is a warm-up
            seconds, batches, end_s = 0.0, 0, time.monotonic() + RUN_S
            while time.monotonic() < end_s:
                queue.put(payloads)
                seconds += stepper.seconds()
                batches += 1
            return batches * SMALL / seconds

        def with_tabs() -> float:
            with tabs.open():
                return rate()

        yield Case(
            key="P17-driver",
            title=f"exactly-once word count with the page open in {TABS} tabs; without, over {TOPOLOGIES} topologies",
            unit=Unit.MESSAGES,
            goal=Goal(ratio=0.98),
            ours=with_tabs,
            theirs=rate,
            pairs_most=9,
            warm_ups=1,
        )


@contextmanager
def processor_with_tabs(bench: Workbench, what: str, about: str, bound: float) -> Generator[Case]:
    """Processor seconds a second of the page or of the ledger's Postgres, while nothing but the tabs uses them."""
    data = _data_directory(bench)
    with _page(bench) as (tabs, page):

        def used_s() -> float:
            return _processor_s(data) if what == "ledger" else sum(page.cpu_times()[:2])

        def share() -> float:
            with tabs.open():
                before, start_s = used_s(), time.monotonic()
                time.sleep(RUN_S)
                return (used_s() - before) / (time.monotonic() - start_s)

        yield Case(
            key=f"P17-{what}",
            title=f"processor seconds a second of {about}, {TABS} tabs, {TOPOLOGIES} topologies; goal's bound",
            unit=Unit.SECONDS,
            goal=Goal(own=bound),
            ours=share,
            theirs=bound,
            pairs_most=5,
            warm_ups=1,
        )


def _data_directory(bench: Workbench) -> Path:
    with bench.connect() as connection:
        row = connection.execute("show data_directory").fetchone()
    assert row is not None
    return Path(row[0])


def _processor_s(data: Path) -> float:
    """What the server's processes have used so far, those included that have ended."""
    pid = int((data / "postmaster.pid").read_text().splitlines()[0])
    found = 0.0
    for process in (server := psutil.Process(pid), *server.children(recursive=True)):
        try:
            used = process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        found += used.user + used.system
        if process.pid == pid:
            found += used.children_user + used.children_system
    return found


def p17(bench: Workbench) -> Iterator[AbstractContextManager[Case]]:
    """The cases of P17."""
    _fill(bench)
    yield processor_with_tabs(bench, "ledger", "the ledger's Postgres", CORE_SHARE)
    yield processor_with_tabs(bench, "page", "the page", MACHINE_SHARE * (os.cpu_count() or 1))
    yield driver_with_tabs(bench)
