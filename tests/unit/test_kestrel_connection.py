"""A connection to a Kestrel server: each answer that Kestrel, Siberite and Darner give to a read, and what is none."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress

import pytest

from stormproof.core.source.kestrel.client import KestrelConnection, ProtocolError


@contextmanager
def answering(answer: bytes) -> Generator[KestrelConnection]:
    """A connection to a server that answers whatever it is asked with this, and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            client, _ = listener.accept()
            with client, suppress(OSError):
                client.recv(1_000)
                client.sendall(answer)
                client.shutdown(socket.SHUT_WR)
                client.recv(1_000)  # until the other end hangs up

        thread = threading.Thread(target=serve)
        thread.start()
        connection = KestrelConnection("127.0.0.1", listener.getsockname()[1], "q", 10.0)
        try:
            yield connection
        finally:
            connection.drop()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "items"),
    [
        (b"END\r\n", []),
        (b"VALUE q 0 1\r\na\r\nEND\r\n", [b"a"]),
        (b"VALUE q 0 0\r\n\r\nEND\r\n", [b""]),
        (b"VALUE q 0 1\r\n\x00\r\nEND\r\n", [b"\x00"]),  # Darner's empty item
        (b"VALUE q 0 7\r\n\r\nEND\r\n\r\nEND\r\n", [b"\r\nEND\r\n"]),
    ],
)
def test_an_answer(answer: bytes, items: list[bytes]) -> None:
    with answering(answer) as connection:
        connection.ask(1)
        assert connection.given(1) == items
        assert connection.open == len(items)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"CLIENT_ERROR Too many open reads\r\n", "CLIENT_ERROR"),  # Siberite, of a second open read
        (b"ERROR\r\n", "ERROR"),  # Kestrel
        (b"VALUE q 0 x\r\na\r\nEND\r\n", "no length of a value"),
        (b"VALUE q 0 1\r\nab\r\nEND\r\n", "a value does not end where its length says"),
        (b"x" * 10_000, "a line has no end"),
    ],
)
def test_what_is_no_answer(answer: bytes, says: str) -> None:
    with answering(answer) as connection:
        connection.ask(1)
        with pytest.raises(ProtocolError, match=says):
            connection.given(1)


@pytest.mark.parametrize("answer", [b"", b"VALUE q 0 5\r\nab"])
def test_a_server_that_hangs_up(answer: bytes) -> None:
    """Darner does, at a second open read."""
    with answering(answer) as connection:
        connection.ask(1)
        with pytest.raises(ConnectionResetError):
            connection.given(1)


@pytest.mark.parametrize("end", [KestrelConnection.close_reads, lambda connection, _: connection.abort_reads()])
def test_an_end_of_a_read_is_answered_without_an_item(end: Callable[[KestrelConnection, int], object]) -> None:
    with answering(b"VALUE q 0 1\r\na\r\nEND\r\nEND\r\n") as connection:
        connection.ask(1)
        assert connection.given(1) == [b"a"]
        end(connection, 1)
        connection.ended(1)
        assert connection.open == 0
