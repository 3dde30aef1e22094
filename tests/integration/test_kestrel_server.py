"""The Kestrel test server speaks as Kestrel does: the cases of its handlers, over real connections, through restarts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.brokers import running
from support.brokers.kestrel_broker import EXAMPLES, KestrelClient, KestrelServer


@pytest.fixture
def client(kestrel: KestrelServer) -> Iterator[KestrelClient]:
    with kestrel.client() as client:
        yield client


@pytest.fixture
def other(kestrel: KestrelServer) -> Iterator[KestrelClient]:
    with kestrel.client() as client:
        yield client


@pytest.fixture
def queue(request: pytest.FixtureRequest) -> str:
    return str(request.node.name)


def test_open_close_abort_and_peek(client: KestrelClient, other: KestrelClient, queue: str) -> None:
    client.put(queue, b"a", b"b", b"c")
    assert client.get(f"{queue}/peek") == b"a"
    assert client.get(f"{queue}/open") == b"a"
    assert other.get(f"{queue}/open") == b"b"
    assert client.get(f"{queue}/close") is None
    assert other.get(f"{queue}/abort") is None
    assert client.get(f"{queue}/close/open") == b"b"
    assert client.get(f"{queue}/close/open") == b"c"
    assert client.get(f"{queue}/close/open") is None
    stats = client.stats(queue)
    assert (stats["items"], stats["open_transactions"], stats["total_items"]) == (0, 0, 3)
    assert (stats["transactions"], stats["canceled_transactions"]) == (4, 1)


def test_a_connection_that_goes_gives_back_what_it_has_open(
    kestrel: KestrelServer, client: KestrelClient, queue: str
) -> None:
    client.put(queue, b"a", b"b")
    with kestrel.client() as gone:
        assert gone.get(f"{queue}/open") == b"a"
    assert client.get(f"{queue}/t=5000/open") in (b"a", b"b")  # it may hear of it late
    client.get(f"{queue}/close")
    assert client.get(f"{queue}/t=5000/open") in (b"a", b"b")
    client.get(f"{queue}/close")
    assert client.stats(queue)["items"] == 0


def test_a_get_waits_for_an_item_as_long_as_it_says(client: KestrelClient, other: KestrelClient, queue: str) -> None:
    began = time.monotonic()
    assert client.get(f"{queue}/t=50") is None
    assert time.monotonic() - began >= 0.05
    client.send(f"get {queue}/open/t=20000")
    other.put(queue, b"late")
    assert client.next_line().startswith("VALUE")
    assert client.next_line() == "late"


@pytest.mark.parametrize("options", ["abort/open", "abort/close", "peek/open", "peek/close", "peek/abort", "nonsense"])
def test_what_cannot_be_combined_is_refused_and_ends_the_connection(
    client: KestrelClient, queue: str, options: str
) -> None:
    assert client.line(f"get q/{options}").startswith("CLIENT_ERROR")
    assert client.next_line() == ""


@pytest.mark.parametrize("then", ["/open", ""])
def test_a_second_read_of_a_connection_ends_it_and_gives_the_first_back(
    client: KestrelClient, other: KestrelClient, then: str
) -> None:
    queue = f"second{len(then)}"
    client.put(queue, b"a", b"b")
    assert client.get(f"{queue}/open") == b"a"
    assert client.line(f"get {queue}{then}") == "ERROR"
    assert client.next_line() == ""
    assert other.get(f"{queue}/t=5000") == b"a"


@pytest.mark.parametrize("line", ["set q 0 0 x", "set a/b 0 0 1\r\n1", "set a~b 0 0 1\r\n1", "what", "get", ""])
def test_what_is_no_command_ends_the_connection(client: KestrelClient, line: str) -> None:
    assert client.line(line).startswith("CLIENT_ERROR")


def test_delete_flush_and_expiry(client: KestrelClient, queue: str) -> None:
    client.put(queue, b"a", b"b")
    assert client.line(f"flush {queue}") == "END"
    assert client.get(queue) is None
    client.put(queue, b"old", expiry_s=1)
    client.put(queue, b"new")
    assert client.get(f"{queue}/peek") == b"old"
    assert client.line(f"delete {queue}") == "DELETED"
    assert client.get(queue) is None
    assert client.line("version").startswith("VERSION")
    assert client.line("status") == "UP"


def test_every_byte_is_a_payload(client: KestrelClient, queue: str) -> None:
    items = [bytes(range(256)), b"", b"\r\n", b"END\r\n", b"x" * 300_000]
    client.put(queue, *items)
    assert [client.get(queue) for _ in items] == items


def test_a_kill_and_a_restart_keep_what_was_answered(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where Siberite 0.6.4 loses the open item, this server has it back, as Kestrel and Darner 0.2.0 do."""
    with running(KestrelServer, tmp_path_factory) as server:
        with server.client() as client:
            client.put("q", b"c0", b"c1", b"c2")
            client.get("q/open")
            server.restart()
        with server.client() as after:
            assert [after.get("q") for _ in range(4)] == [b"c0", b"c1", b"c2", None]


def test_it_prints_its_port_and_ends_on_sigterm(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kestrel_server.server", "--port", "0", "--dir", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=EXAMPLES) as process:
        assert process.stdout is not None
        port = int(process.stdout.readline())
        with KestrelClient(port) as client:
            assert client.put("q", b"a") == ["STORED"]
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
    assert (tmp_path / "q").stat().st_size > 0
