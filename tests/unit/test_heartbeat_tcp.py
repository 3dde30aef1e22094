"""The heartbeat over TCP: what the driver hears of tasks that run, end, die or fall silent, and what strangers can do."""

from __future__ import annotations

import errno
import os
import pickle
import signal
import socket
import struct
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.heartbeats import note, until

from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import FatalError, MachineUnavailable, SettingsError
from stormproof.core.contract.schema import parse_schema
from stormproof.core.graph.components import OperationKind
from stormproof.core.graph.plan import OperationNode
from stormproof.core.heartbeat import task as connection_module
from stormproof.core.heartbeat.listener import (
    GRACE_S,
    HELLO_S,
    RESTARTS_MAX,
    SILENT_S,
    STRANGERS_MAX,
    DriverAddress,
    HeartbeatListener,
    JobSigns,
    quiet_for,
    suspects_of_dead,
)
from stormproof.core.heartbeat.task import (
    CHALLENGE_BYTES,
    HELLO_BYTES,
    NOTHING,
    RECORD,
    STATE,
    ContactLost,
    DriverConnection,
    Heartbeat,
    ProgressMark,
    Record,
    hello,
)
from stormproof.core.task.operate import apply

LOOPBACK = DriverAddress("127.0.0.1", "127.0.0.1")
WAIT_S = 10.0


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def listener(clock: ManualClock) -> Iterator[HeartbeatListener]:
    with HeartbeatListener(LOOPBACK, clock=clock) as made:
        yield made
    assert not [thread for thread in threading.enumerate() if thread.name == "stormproof-heartbeat-listener"]


@pytest.fixture
def heard(listener: HeartbeatListener) -> Iterator[JobSigns]:
    with listener.job() as made:
        yield made


@contextmanager
def child(heard: JobSigns, message: int, *, careful: bool = True) -> Generator[int]:
    """A task in a process of its own, which has this message in hand and waits to be killed."""
    ready, says = os.pipe()
    process = os.fork()
    if process == 0:
        heartbeat = Heartbeat(heard.place, 0, 0, careful=careful)
        note(heartbeat, message)
        os.write(says, b"r")
        signal.pause()
        os._exit(0)
    try:
        assert os.read(ready, 1) == b"r"
        yield process
    finally:
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        os.close(ready)
        os.close(says)


class Network:
    """The connections that this process makes; they can be broken, and kept from being made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._made: list[socket.socket] = []
        self._connect = socket.create_connection
        self.is_cut = False
        monkeypatch.setattr(socket, "create_connection", self.connect)

    def connect(self, address: tuple[str, int], timeout: float | None = None) -> socket.socket:
        if self.is_cut:
            raise ConnectionRefusedError(errno.ECONNREFUSED, "the cable is out")
        self._made.append(self._connect(address, timeout))
        return self._made[-1]

    def break_last(self) -> None:
        """End the newest connection with a reset, as a machine in between, or one that was started anew, would."""
        self._made[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._made[-1].close()


@pytest.fixture
def network(monkeypatch: pytest.MonkeyPatch) -> Network:
    return Network(monkeypatch)


def stranger(listener: HeartbeatListener) -> socket.socket:
    return socket.create_connection(("127.0.0.1", listener.port), timeout=WAIT_S)


def test_rows_an_end_and_a_failure_are_heard(heard: JobSigns) -> None:
    with Heartbeat(heard.place, 0, 0, careful=False) as heartbeat:
        until(lambda: heard.progress() == ProgressMark(0, 1, 1))
        heartbeat.beat(10)
        heartbeat.publish()
        until(lambda: heard.progress().rows == 10)
    until(lambda: heard.progress() == ProgressMark(10, 1, 0))
    with suppress(KeyError), Heartbeat(heard.place, 0, 1, careful=True) as heartbeat:
        note(heartbeat, 7)
        raise KeyError
    until(lambda: heard.progress() == ProgressMark(11, 2, 0))
    assert heard.suspects() == (7,), "a failed task's message stays a suspect"


def test_the_message_in_hand_outlives_a_killed_worker_and_that_is_dead_not_silent(
    heard: JobSigns, clock: ManualClock
) -> None:
    with child(heard, -12) as process:
        until(lambda: heard.suspects() == (-12,))
        os.kill(process, signal.SIGKILL)
        until(lambda: not heard.connections())
        assert heard.progress() == ProgressMark(0, 1, 1), "it may connect again"
        clock.advance(GRACE_S)
        assert heard.progress() == ProgressMark(0, 1, 0)
    assert heard.suspects() == (-12,)


def test_a_worker_that_stands_still_runs_and_is_not_silent(heard: JobSigns) -> None:
    """It hangs, and the message in its hand is to blame: its machine answers for it."""
    with child(heard, 5) as process:
        until(lambda: heard.suspects() == (5,))
        os.kill(process, signal.SIGSTOP)
        (connection,) = heard.connections()
        until(lambda: quiet_for(connection) > 0.5)
        until(lambda: quiet_for(connection) < 0.5)
        assert heard.progress() == ProgressMark(0, 1, 1, silent=0)


def test_a_machine_that_does_not_answer_makes_its_tasks_silent() -> None:
    quiet = [0.0]
    with (
        HeartbeatListener(LOOPBACK, quiet=lambda _: quiet[0]) as listener,
        listener.job() as heard,
        Heartbeat(heard.place, 0, 0, careful=False),
    ):
        until(lambda: heard.progress() == ProgressMark(0, 1, 1))
        quiet[0] = SILENT_S + 0.1
        assert heard.progress() == ProgressMark(0, 1, 1, silent=1)
        quiet[0] = 0.0
        assert heard.progress() == ProgressMark(0, 1, 1)


def test_a_broken_connection_is_silence_until_it_is_made_again(
    heard: JobSigns, clock: ManualClock, network: Network
) -> None:
    with Heartbeat(heard.place, 0, 0, careful=True) as heartbeat:
        rows = heartbeat.each("ab")
        until(lambda: heard.progress().running == 1)
        network.is_cut = True
        network.break_last()
        until(lambda: heard.progress().silent == 1)
        clock.advance(100 * GRACE_S)
        assert heard.progress() == ProgressMark(0, 1, 1, silent=1), "nobody knows whether it lives"
        network.is_cut = False
        assert list(rows) == ["a", "b"]
        note(heartbeat, 9)
        until(lambda: heard.suspects() == (9,))
        assert heard.progress().started == 1, "the same task, not another one"
        assert heard.progress().silent == 0
    until(lambda: heard.progress() == ProgressMark(3, 1, 0))


def test_a_careful_task_that_cannot_note_gives_up_and_no_message_is_to_blame(
    heard: JobSigns, network: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even where the loop over messages stands inside a `try`, as it does around users' functions."""
    monkeypatch.setattr(connection_module, "WAIT_S", 0.05)
    monkeypatch.setattr(connection_module, "CLOSE_S", 0.05)
    node = OperationNode("f", OperationKind.MAP, str, ("word",), parse_schema("word string"), ())
    rows = pa.record_batch({"word": ["a", "b"]})
    with Heartbeat(heard.place, 0, 0, careful=True) as heartbeat:
        heartbeat.at(np.arange(rows.num_rows))
        assert not apply(node, rows, heartbeat).failed
        network.is_cut = True
        network.break_last()
        with pytest.raises(ContactLost, match="No message is to blame") as raised:
            apply(node, rows, heartbeat)
    assert isinstance(pickle.loads(pickle.dumps(raised.value)), MachineUnavailable)  # noqa: S301 - our own


def test_a_jobs_end_is_told_to_tasks_that_run_on(listener: HeartbeatListener) -> None:
    with listener.job() as heard, ExitStack() as stack:
        heartbeat = stack.enter_context(Heartbeat(heard.place, 0, 0, careful=True))
        until(lambda: heard.progress().running == 1)
        late = stack.pop_all()
    until(lambda: not heard.connections())
    heartbeat.at(np.arange(1_000))
    with pytest.raises(ContactLost, match="the job is over"):
        list(heartbeat.each(range(1_000)))
    late.close()
    with pytest.raises(ContactLost, match="another driver took over"):
        Heartbeat(heard.place, 0, 1, careful=False)


def test_strangers_cost_nothing(listener: HeartbeatListener, heard: JobSigns, clock: ManualClock) -> None:
    with Heartbeat(heard.place, 0, 0, careful=False) as heartbeat:
        threads = threading.active_count()
        wrong = replace(heard.place, token=bytes(32))
        with stranger(listener) as one:
            one.sendall(hello(wrong, bytes(16), one.recv(CHALLENGE_BYTES)))
            until(lambda: listener.refused["wrong token"] == 1)
            assert one.recv(1) == b""
        with stranger(listener) as garbage:
            garbage.sendall(b"GET / HTTP/1.1\r\n\r\n" * 5_000)
            until(lambda: listener.refused["no hello"] == 1)
        with stranger(listener) as slow:
            assert slow.recv(1) != b"", "it was accepted"
            slow.sendall(b"S")
            clock.advance(HELLO_S)
            until(lambda: listener.refused["too slow"] == 1)
        with ExitStack() as many:
            for _ in range(STRANGERS_MAX + 20):
                many.enter_context(stranger(listener))
            until(lambda: listener.refused["too many"] == 20)
        assert threading.active_count() <= threads
        heartbeat.beat(5)
        heartbeat.publish()
        until(lambda: heard.progress() == ProgressMark(5, 1, 1))


def test_a_proof_is_good_for_one_challenge_only(listener: HeartbeatListener, heard: JobSigns) -> None:
    with stranger(listener) as one, stranger(listener) as other:
        said = hello(heard.place, bytes(16), one.recv(CHALLENGE_BYTES))
        assert len(said) == HELLO_BYTES
        other.recv(CHALLENGE_BYTES)
        other.sendall(said)
        until(lambda: listener.refused["wrong token"] == 1)
        assert heard.progress() == ProgressMark()


def test_a_task_that_sends_no_record_is_dropped(listener: HeartbeatListener, heard: JobSigns) -> None:
    with stranger(listener) as one:
        one.sendall(hello(heard.place, bytes(16), one.recv(CHALLENGE_BYTES)))
        assert one.recv(1) == b"+"
        one.sendall(RECORD.pack(*NOTHING[:STATE], 99, 0, 0, 0))
        until(lambda: listener.refused["no record"] == 1)
        assert heard.progress().silent == 1


def test_a_token_is_in_no_text(heard: JobSigns) -> None:
    assert repr(heard.place.token) not in repr(heard.place)
    assert pickle.loads(pickle.dumps(heard.place)) == heard.place  # noqa: S301 - our own


def test_thousands_of_tasks_are_heard_by_one_thread(heard: JobSigns) -> None:
    threads, tasks = threading.active_count(), 300
    waves, made = 10, 0
    for _ in range(waves):
        now = [DriverConnection(heard.place, 0, number) for number in range(tasks)]
        for number, one in enumerate(now):
            one.publish((number, 0, 0, 0, 0, 0))
        assert threading.active_count() == threads
        for number, one in enumerate(now):
            one.close((number, 0, 0, 0, 0, 0), failed=False)
        made += sum(range(tasks))
    until(lambda: heard.progress() == ProgressMark(made, waves * tasks, 0))
    until(lambda: not heard.connections())


def test_a_dead_drivers_suspects_are_found_in_its_folder(tmp_path: Path) -> None:
    process = os.fork()
    if process == 0:
        with HeartbeatListener(LOOPBACK, root=tmp_path) as listener, listener.of_job(("life", 7, 2)) as heard:
            for number, message in enumerate((2, 3, 3)):
                note(Heartbeat(heard.place, 0, number, careful=True), message)
            until(lambda: heard.suspects() == (3,))
            os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 9
    assert suspects_of_dead(tmp_path, "life", 7) == (3,)


def test_a_port_that_is_taken_is_named() -> None:
    with HeartbeatListener(LOOPBACK) as one, pytest.raises(SettingsError, match="STORMPROOF_HEARTBEAT_PORT"):
        HeartbeatListener(LOOPBACK, one.port)


def test_a_fork_of_the_driver_does_not_end_it(listener: HeartbeatListener, heard: JobSigns) -> None:
    with Heartbeat(heard.place, 0, 0, careful=False) as heartbeat:
        until(lambda: heard.progress().running == 1)
        process = os.fork()
        if process == 0:
            listener.close()
            os._exit(0)
        os.waitpid(process, 0)
        heartbeat.beat(3)
        heartbeat.publish()
        until(lambda: heard.progress() == ProgressMark(3, 1, 1))


class Fault:
    """Has the listener's thread meet an error that nobody expected, as often as it is told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
        self.left = times
        reads = JobSigns.reported

        def reported(heard: JobSigns, run: bytes, record: Record) -> None:
            if self.left:
                self.left -= 1
                message = "nobody expected this"
                raise KeyError(message)
            reads(heard, run, record)

        monkeypatch.setattr(JobSigns, "reported", reported)


def test_an_unexpected_error_in_the_listeners_thread_is_logged_and_the_tasks_are_heard_again(
    listener: HeartbeatListener, heard: JobSigns, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fault = Fault(monkeypatch, 1)
    with Heartbeat(heard.place, 0, 0, careful=True) as heartbeat:
        until(lambda: not fault.left)
        until(lambda: _noted(heartbeat, heard, 9))
        found = heard.progress()
        assert (found.started, found.running, found.silent) == (1, 1, 0), "the same task, and it is not silent"
    until(lambda: heard.progress().running == 0)
    (said,) = [record for record in caplog.records if record.levelname == "ERROR"]
    assert "stormproof-heartbeat-listener met an error that nobody expected" in said.message
    assert said.exc_info is not None
    assert "nobody expected this" in str(said.exc_info[1])
    with listener.job():
        pass


def _noted(heartbeat: Heartbeat, heard: JobSigns, message: int) -> bool:
    note(heartbeat, message)
    return heard.suspects() == (message,)


def test_control_an_error_that_comes_again_and_again_stops_the_driver_by_name(
    heard: JobSigns, monkeypatch: pytest.MonkeyPatch, listener: HeartbeatListener
) -> None:
    """It is not taken for silent tasks: nothing is known of them, and no job begins."""
    monkeypatch.setattr(connection_module, "CLOSE_S", 0.05)

    def is_lost() -> bool:
        heartbeat.beat(1)
        heartbeat.publish()
        try:
            heard.progress()
        except OSError as error:
            return "ended 4 times" in str(error)
        return False

    with Heartbeat(heard.place, 0, 0, careful=False) as heartbeat:
        fault = Fault(monkeypatch, 1_000)
        until(is_lost)
    assert fault.left == 1_000 - 1 - RESTARTS_MAX
    with (
        pytest.raises(FatalError, match=r"stormproof-heartbeat-listener at port \d+ ended 4 times.*KeyError"),
        listener.job(),
    ):
        pass
