"""Lineage beside faults: a driver that is killed, and a lineage server that works, hangs, fails or is absent."""

from __future__ import annotations

import json
import logging
import random
import socket
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Generator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.brokers import until
from support.command_line import command_line_in
from support.databases import at
from support.driven import FILE, Driven
from support.lineage_rules import faults
from support.metered import metrics_in
from support.queues import prepared_database, put
from support.topologies import SinkMode, messages, topology

from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.trident.driver.run import driver
from stormproof.trident.telemetry.catalogue import LINEAGE_EVENTS
from stormproof.trident.telemetry.lineage import run_id
from stormproof.trident.telemetry.recorder import CLOSE_S, TIMEOUT_S

pytestmark = pytest.mark.postgres


# -- a driver that is killed -------------------------------------------------------------------------------------------

ENDS: Final = {
    "open.after": "ABORT",
    "run.after": "ABORT",
    "prepare.after": "COMPLETE",
    "commit.after_sink": "COMPLETE",
    "finish.before_commit": "COMPLETE",
}
"""Where the driver of txid 1 is killed, and how the next driver ends that batch."""


def events_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def require_told_of_what_happened(events: list[dict[str, Any]], states: dict[str, str]) -> None:
    """Each run is a batch of the ledger, ends once, and is complete only if the batch was committed."""
    assert [fault for event in events for fault in faults(event)] == []
    ends = Counter(event["run"]["runId"] for event in events if event["eventType"] != "START")
    assert {event["run"]["runId"] for event in events} == ends.keys() == states.keys()
    assert set(ends.values()) == {1}
    for event in events:
        if event["eventType"] != "START":
            assert (event["eventType"] == "COMPLETE") == (states[event["run"]["runId"]] == "committed")
            assert (event["eventType"] == "COMPLETE") != ("errorMessage" in event["run"]["facets"])


@pytest.mark.sampled(0.4)
@pytest.mark.parametrize("point", ENDS)
def test_a_killed_drivers_run_is_ended_by_the_next_driver_under_the_same_id(
    point: str, database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("STORMPROOF_LINEAGE_FILE", str(tmp_path / "events"))
    monkeypatch.setenv("STORMPROOF_LINEAGE_INTERVAL_S", "0")
    command = command_line_in(tmp_path, prepared_database(database), "orders.py", FILE, monkeypatch, capsys)
    run = Driven(database, command)
    run.put("1")
    with run.driver(STORMPROOF_FAILPOINT=f"{point}=pause") as child:
        until(lambda: " T" in Path(f"/proc/{child.pid}/stat").read_text(), f"the driver did not stand still at {point}")
    begun = events_in(tmp_path / "events")  # its thread may not have come to it
    run.put("2")
    command("run", "orders.py:topology", "--engine", "inline", "--until-idle")
    run.until_numbers(1, 2)
    rows = run.rows("select incarnation, txid, state from stormproof.txn order by txid")
    events = events_in(tmp_path / "events")
    require_told_of_what_happened(events, {run_id(life, txid): state for life, txid, state in rows})
    told = defaultdict(list)
    for event in events:
        told[event["run"]["runId"]].append((event["eventType"], event["run"]["facets"]["stormproof"]["epoch"]))
    first = run_id(rows[0][0], 1)
    assert [event["run"]["runId"] for event in begun] in ([], [first])
    assert told[first][0][0] == "START"
    assert told[first][-1] == (ENDS[point], 2)
    # The control: a batch that is said to be complete and was not is seen.
    states = {run_id(life, txid): "aborted" for life, txid, _ in rows}
    with pytest.raises(AssertionError):
        require_told_of_what_happened(events, states)


# -- a server ----------------------------------------------------------------------------------------------------------


class _Takes(ThreadingHTTPServer):
    """Keeps what it is sent: path, authorization and body."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Kept)
        self.sent: list[tuple[str, str | None, dict[str, Any]]] = []


class _Kept(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert isinstance(self.server, _Takes)
        self.server.sent.append((self.path, self.headers["Authorization"], body))
        self.send_response(201)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def serving(server: ThreadingHTTPServer) -> Generator[str]:
    """Its address, while it answers."""
    with server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_server_gets_each_event_once_in_order_and_with_the_key(database: Database, tmp_path: Path) -> None:
    prepared_database(database)
    server = _Takes()
    with serving(server) as url:
        options = {"lineage_url": url, "lineage_api_key": "hidden", "lineage_interval_s": 0}
        run_timed(database, tmp_path, "words", **options)
    assert {(path, key) for path, key, _ in server.sent} == {("/api/v1/lineage", "Bearer hidden")}
    events = [event for _, _, event in server.sent]
    assert [fault for event in events for fault in faults(event)] == []
    with at(database) as connection:
        rows = connection.execute("select incarnation, txid, state from stormproof.txn order by txid").fetchall()
    ends = {"committed": "COMPLETE", "aborted": "ABORT"}
    assert [(event["run"]["runId"], event["eventType"]) for event in events] == [
        (run_id(life, txid), kind) for life, txid, state in rows for kind in ("START", ends[state])
    ]


# -- a server that is no good ------------------------------------------------------------------------------------------


class _Fails(BaseHTTPRequestHandler):
    """Answers 500."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_error(500)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing."""


@contextmanager
def bad_server(fault: str) -> Generator[str]:
    """The address of a server on loopback with this fault."""
    if fault == "answers 500":
        with serving(ThreadingHTTPServer(("127.0.0.1", 0), _Fails)) as url:
            yield url
        return
    with socket.create_server(("127.0.0.1", 0)) as listening:  # the kernel takes connections; nobody answers
        port = listening.getsockname()[1]
        if fault == "is absent":
            listening.close()
        yield f"http://127.0.0.1:{port}"


def run_timed(database: Database, folder: Path, name: str, **settings: Any) -> tuple[float, float, int]:
    """Run a topology over its queue: seconds up to its last batch, seconds from there to its end, and its batches."""
    put(database, name, messages(20))
    done: list[float] = []
    began_s = time.monotonic()
    with driver(
        topology(name, SinkMode.POSTGRES_APPEND, folder, database, name),
        settings=Settings(
            database_url=database.sqlalchemy_url.render_as_string(hide_password=False),
            home=folder / "home",
            batch_messages=2,
            **settings,
        ),
        engine="inline",
        until_idle=True,
        rng=random.Random(1),
        on_batch=lambda _: done.append(time.monotonic()),
    ) as coordinator:
        coordinator.run()
    return done[-1] - began_s, time.monotonic() - done[-1], len(done)


@pytest.mark.parametrize("fault", ["hangs", "answers 500", "is absent"])
def test_a_server_that_is_no_good_holds_up_no_batch_and_what_was_dropped_is_counted(
    fault: str, database: Database, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prepared_database(database)
    without_s, _, _ = run_timed(database, tmp_path, "without")
    log = caplog.at_level(logging.WARNING, "stormproof.lineage")
    with bad_server(fault) as url, log, metrics_in(tmp_path / "metrics"):
        took_s, ended_s, batches = run_timed(
            *(database, tmp_path, "beside"),
            lineage_url=url,
            lineage_interval_s=0,
            metrics_port=0,
        )
    # One event that was waited for takes TIMEOUT_S at a server that hangs, and each batch has two.
    assert batches > 10
    assert took_s < 2 * without_s + TIMEOUT_S
    assert ended_s < without_s + CLOSE_S + TIMEOUT_S
    counts = {
        sample.labels["event"]: int(sample.value)
        for family in text_string_to_metric_families((tmp_path / "metrics").read_text())
        for sample in family.samples
        if sample.name == LINEAGE_EVENTS.exported
    }
    with at(database) as connection:
        asked = "select count(*)::int from stormproof.txn join stormproof.topology using (incarnation) where name = 'beside'"
        ((recorded,),) = connection.execute(asked).fetchall()
    assert counts["sent"] == counts["merged"] == 0
    assert counts["failed"] + counts["dropped"] == 2 * recorded
    assert counts["dropped"] > 0
    assert f"{counts['dropped']} lineage events were not sent within {CLOSE_S:g} s of the end" in caplog.text
    assert url not in caplog.text
