"""The lineage of a run, as the settings ask for it."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from stormproof.core.clock import Clock
from stormproof.core.dataset import DatasetName
from stormproof.core.errors import SettingsError
from stormproof.core.extras import required
from stormproof.core.graph.plan import Plan
from stormproof.core.guarantee import Guarantee
from stormproof.core.settings import Settings
from stormproof.core.source.protocol import Source
from stormproof.trident.ledger.rows import Run
from stormproof.trident.observers import Observer

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
    from stormproof.trident.openlineage.emitter import Emitter
    from stormproof.trident.openlineage.events import Output, Told
    from stormproof.trident.openlineage.reporter import LineageReporter

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
