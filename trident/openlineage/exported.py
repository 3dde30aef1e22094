"""The lineage of a run, as the settings ask for it.

Events are sent from a thread of its own: a lineage server that is slow or dead neither slows nor ends the driver.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final, Protocol
from urllib.parse import unquote, urlsplit

from stormproof.core.base.clock import Clock
from stormproof.core.base.dataset import DatasetName
from stormproof.core.base.errors import SettingsError
from stormproof.core.base.machine_faults import required
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Source
from stormproof.core.graph.plan import Plan
from stormproof.core.start.settings import Settings
from stormproof.trident.ledger.tables import Run
from stormproof.trident.terms.observers import Observer

log = logging.getLogger("stormproof.lineage")

WAITING_MAX: Final = 1_000
"""Events that may wait to be sent; a further one is dropped, and counted."""
CLOSE_S: Final = 5.0
"""How long the end of a run waits for the last events."""


class Transport(Protocol):
    """What takes an event somewhere; as OpenLineage's own client has them."""

    def emit(self, event: Any) -> Any:
        """Send it, or raise."""
        ...


class Emitter:
    """A bounded queue and the thread that empties it. `count` is told ``sent``, ``failed`` or ``dropped``, from any thread.

    Forks: the thread is not in a fork, whose events are nobody's.
    """

    def __init__(self, transport: Transport, count: Callable[[str], None], *, waiting_max: int = WAITING_MAX) -> None:
        self._transport = transport
        self._count = count
        self._waiting: queue.Queue[Any] = queue.Queue(waiting_max)
        self._is_failing = False
        self._drops = False
        self._done = threading.Event()
        self._counting = threading.Lock()
        self._is_given_up = False
        """Whether what was not sent is counted as dropped: what becomes of it later is not counted again."""
        self._thread = threading.Thread(target=self._keep, name="stormproof-lineage", daemon=True)
        self._thread.start()

    def emit(self, event: Any) -> None:
        """Have an event sent; returns at once."""
        try:
            self._waiting.put_nowait(event)
        except queue.Full:
            self._count("dropped")
            if not self._drops:
                log.warning("lineage events are dropped: %d wait to be sent already", self._waiting.maxsize)
            self._drops = True

    def close(self, within_s: float = CLOSE_S) -> None:
        """Send what waits, but for no longer than this; what is left then counts as dropped, and is logged."""
        self._done.set()
        self._thread.join(within_s)
        with self._counting:
            self._is_given_up = True
            left = self._waiting.unfinished_tasks  # those that wait, and the one under way
        for _ in range(left):
            self._count("dropped")
        if left:
            log.warning("%d lineage events were not sent within %g s of the end, and are dropped", left, within_s)

    def _keep(self) -> None:
        while True:
            try:
                event = self._waiting.get(timeout=0.1)
            except queue.Empty:
                if self._done.is_set():
                    return
                continue
            error = self._sent(event)
            with self._counting:
                if self._is_given_up:
                    return
                self._count("sent" if error is None else "failed")
                self._waiting.task_done()
            if error is not None and not self._is_failing:
                log.warning("a lineage event was not taken (%s); the run goes on", type(error).__name__)
            self._is_failing = error is not None
            if error is None:
                self._drops = False

    def _sent(self, event: Any) -> Exception | None:
        """Send an event; the error if it was not taken."""
        try:
            self._transport.emit(event)
        except Exception as error:  # noqa: BLE001 - whatever a transport raises, the driver goes on
            return error
        return None


EXTRA: Final = "openlineage"
TIMEOUT_S: Final = 5.0


@contextmanager
def exported_lineage(
    transport: Any,
    settings: Settings,
    plan: Plan,
    source: Source,
    run: Run,
    guarantee: Guarantee,
    clock: Clock,
    *,
    streaming: bool,
    count: Callable[[str], None] | None = None,
) -> Generator[tuple[Observer, ...]]:
    """What tells of a run's batches inside the block, by a transport that `lineage_transport` made; nothing without one.

    `count` is told what became of each event.
    """
    if transport is None:
        yield ()
        return
    pass
    from stormproof.trident.openlineage.reporter import LineageReporter, Output, Told

    outputs = {
        sink.name: Output(
            sink.dataset or DatasetName("stormproof", f"{plan.topology}.{sink.name}"),
            tuple((column.name, str(column.type)) for column in plan.sinks[sink.name].schema),
        )
        for sink in plan.sink_specs
    }
    inputs = source.datasets() or (DatasetName("stormproof", source.name),)
    told = Told(
        settings.lineage_namespace,
        *(plan.topology, run.incarnation, run.epoch, guarantee.value, streaming, inputs, outputs),
    )
    counted: Callable[[str], None] = count or (lambda _: None)
    emitter = Emitter(transport, counted)
    reporter = LineageReporter(
        told,
        emitter.emit,
        clock,
        interval_s=settings.lineage_interval_s,
        error_texts=settings.lineage_error_texts,
        merged=lambda: counted("merged"),
    )
    try:
        yield (reporter,)
    finally:
        reporter.close()
        emitter.close()


def lineage_transport(settings: Settings) -> Any:
    """Where events go; None where no server and no file is named. Nothing is connected.

    Raises:
        MachineUnfit: OpenLineage's client is not installed; says what installs it.
        SettingsError: both a server and a file are named, the server's URL cannot be read, or the file cannot be written.
    """
    if settings.lineage_url is None and settings.lineage_file is None:
        return None
    required("openlineage.client", EXTRA, "lineage")
    if settings.lineage_url is not None and settings.lineage_file is not None:
        raise SettingsError("lineage_url and lineage_file are both set: name one of them", setting="lineage_file")
    if settings.lineage_file is not None:
        from openlineage.client.transport.file import FileConfig, FileTransport

        path = settings.lineage_file.absolute()
        try:
            path.open("ab").close()
        except OSError as error:
            raise SettingsError(
                f"lineage_file {path} cannot be written: {error.strerror}; nothing was started", setting="lineage_file"
            ) from error
        return FileTransport(FileConfig(str(path), append=True))
    import requests
    from openlineage.client.transport.http import ApiKeyTokenProvider, HttpConfig, HttpTransport, TokenProvider

    assert settings.lineage_url is not None
    key = settings.lineage_api_key
    auth = TokenProvider({}) if key is None else ApiKeyTokenProvider({"api_key": key.get_secret_value()})
    url = urlsplit(settings.lineage_url.get_secret_value())
    session = requests.Session()
    if url.username is not None:  # the client logs its URL, and quotes it in errors
        session.auth = (unquote(url.username), unquote(url.password or ""))
    public = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
    try:
        return HttpTransport(HttpConfig(public, timeout=TIMEOUT_S, auth=auth, session=session))
    except ValueError:  # whose text has the URL
        raise SettingsError(
            "lineage_url cannot be read; write https://HOST:PORT or https://USER:PASSWORD@HOST:PORT",
            setting="lineage_url",
        ) from None
