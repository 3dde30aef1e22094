"""The ports that servers of tests get: given once, whoever asks, and not such as the system gives to clients."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

from support.brokers import free_port, keep_port

TESTS = Path(__file__).parents[1]


def test_each_keep_port_once() -> None:
    ports = [free_port() for _ in range(50)]
    assert len(set(ports)) == len(ports)
    assert not any(keep_port(port) for port in ports)


def test_another_process_does_not_get_it() -> None:
    ask = "import sys; from support.brokers import keep_port; print(keep_port(int(sys.argv[1])))"
    child = [sys.executable, "-c", ask, str(free_port())]
    assert subprocess.run(child, cwd=TESTS, capture_output=True, text=True, check=True).stdout == "False\n"


def test_one_that_somebody_listens_on_is_not_given() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert not keep_port(listening.getsockname()[1])
