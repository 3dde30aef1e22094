"""Secrets that are planted wherever one can be given are nowhere that people or other programs read."""

from __future__ import annotations

import json
import logging
import threading
import traceback
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from io import StringIO
from pathlib import Path
from typing import Any, Final

import pytest
from pydantic import SecretStr
from support.brokers import running
from support.brokers.nats_server import NatsServer
from support.command_line import command_line_in
from support.shown import sql
from support.web import READER, client, page_of

from stormproof import DeltaSink, NatsSource, RabbitMQSource, RedisStreamSource, Settings
from stormproof.core.base.errors import StormproofError
from stormproof.core.contract.schema import parse_schema
from stormproof.core.contract.sink import SinkInput
from stormproof.core.postgres.database import Database, connect
from stormproof.core.source.nats.client import NatsConsumer
from stormproof.core.source.rabbitmq.client import BrokerQueue, limits_said
from stormproof.core.source.redis_streams.client import Group
from stormproof.core.storage.protocol import use_storage
from stormproof.sinks.contract.protocol import SinkIdentity
from stormproof.trident.telemetry.recorder import lineage_transport
from stormproof.trident.web.people import WebOptions

pytestmark = pytest.mark.postgres

PLANTED: Final = "pl4nted"
"""Every secret below has it."""
NAME: Final = "orders"
FILE: Final = f"""
import os
from stormproof import NatsSource, PostgresSink, Topology

def number(line: str) -> int:
    if line == "leaks":
        raise ValueError(os.environ["BROKER"])
    return int(line)

def topology() -> Topology:
    t = Topology("{NAME}")
    source = NatsSource("ORDERS", url=os.environ["BROKER"], max_attempts=1, database=os.environ["OTHER"])
    numbers = t.stream("lines", source).map(number, "line", schema="n int")
    numbers.into(PostgresSink(os.environ.get("TABLE", "numbers"), database=os.environ["OTHER"]))
    return t
"""
TARGET: Final = "orders.py:topology"
CALLS: Final[Sequence[Sequence[str]]] = (
    ("explain", TARGET),
    ("status", NAME),
    ("audit", "verify", NAME),
    ("audit", "txn", NAME, "1"),
    ("audit", "components", NAME),
    ("dead-letters", "list", NAME),
    ("metrics", NAME),
    ("doctor", "--no-spark"),
    ("psql", "--url"),
)
VIEWS: Final = ("/", f"/topology?topology={NAME}", f"/batch?topology={NAME}&txid=1", "/failures", "/questions")


class Guarded(NatsServer):
    """A server that asks for a token."""

    @property
    def url(self) -> str:
        return f"nats://{PLANTED}-token@127.0.0.1:{self.port}"

    def command(self) -> Sequence[str]:
        return [*super().command(), "--auth", f"{PLANTED}-token"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    with running(Guarded, tmp_path_factory) as server:
        yield server


@pytest.fixture
def events() -> Iterator[tuple[str, list[str]]]:
    """A lineage server: its address, and what it was told."""
    told, signed = list[str](), list[str]()

    class Keeps(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            signed.append(str(self.headers["Authorization"]))
            told.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Keeps) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"127.0.0.1:{server.server_port}", told
        server.shutdown()
        thread.join()
    by_url = b64encode(f"user:{PLANTED}-lineage".encode()).decode()
    assert set(signed) == {f"Basic {by_url}"}, "the server is given what is shown to nobody"


@pytest.fixture
def everything(
    broker: Guarded,
    database: Database,
    events: tuple[str, list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Callable[[Sequence[bytes]], Mapping[str, str]]:
    """Runs a topology with secrets everywhere over these messages; gives each thing that can be read, by its name."""
    lineage, told = events
    with_password = Database.of({**dict(database.parameters), "password": f"{PLANTED}-password"})
    planted = {
        "BROKER": broker.url,
        "OTHER": with_password.adbc_uri,
        "STORMPROOF_LINEAGE_URL": f"http://user:{PLANTED}-lineage@{lineage}",
        "STORMPROOF_LINEAGE_API_KEY": f"{PLANTED}-key",
        "STORMPROOF_LINEAGE_INTERVAL_S": "0",
        "STORMPROOF_LOG_LEVEL": "debug",
        "STORMPROOF_STORAGE_OPTIONS": json.dumps({"azure_storage_sas_key": f"sv=2024&sig={PLANTED}"}),
        "STORMPROOF_SPARK": json.dumps({"spark.hadoop.fs.azure.sas.c.shop.blob.core.windows.net": PLANTED}),
        "PATH": f"{tmp_path}:/usr/bin:/bin",
    }
    command = command_line_in(tmp_path, with_password, "orders.py", FILE, monkeypatch, capsys)
    for name, value in planted.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "psql").write_text(f'#!/bin/sh\nprintf "%s\\n" "$0" "$@" > {tmp_path}/argv\n')
    (tmp_path / "psql").chmod(0o700)

    def run(messages: Sequence[bytes]) -> Mapping[str, str]:
        found, log = dict[str, str](), StringIO()
        handler, root = logging.StreamHandler(log), logging.getLogger()
        level = root.level
        root.addHandler(handler)
        root.setLevel(logging.DEBUG)
        broker.make("ORDERS")
        broker.put("ORDERS", messages)
        try:
            for how in ("--dry-run", "--until-idle"):
                code, *printed = command.ended("run", TARGET, "--engine", "inline", how)
                assert code in (0, 4), printed  # a dry run reads nothing of a broker that hands messages out
                found[f"run {how}"] = "".join(printed)
        finally:
            root.removeHandler(handler)
            root.setLevel(level)
            broker.delete("ORDERS")
        for call in CALLS:
            for form in ((), ("--json",)):
                code, *printed = command.ended(*call, *form)
                assert code in (0, 1), (call, printed)
                found[" ".join((*call, *form))] = "".join(printed)
        command.ended("psql")
        command("audit", "report", NAME, "--out", "report.html")
        found |= {
            "every logger": log.getvalue(),
            "lineage": "".join(told),
            "report": Path("report.html").read_text(),
            "psql's command line": Path("argv").read_text(),
            "ledger": rows_of(database),
        }
        app = page_of(with_password, WebOptions(lambda _: READER))
        found |= {f"page {view}": client(app).get(view).text for view in VIEWS}
        app.close()
        return found

    return run


def rows_of(database: Database) -> str:
    """Every row of every table in the database."""
    tables = sql(
        database, "select format('%I.%I', schemaname, tablename) from pg_tables where schemaname !~ '^(pg_|info)'"
    )
    return "\n".join(str(row) for (table,) in tables for row in sql(database, f"select t::text from {table} t"))


def with_secrets(found: Mapping[str, str]) -> set[str]:
    return {name for name, text in found.items() if PLANTED in text}


@pytest.mark.sampled(0.5)
def test_no_planted_secret_is_anywhere_that_is_read(
    everything: Callable[[Sequence[bytes]], Mapping[str, str]],
) -> None:
    found = everything([b"1", b"2", b"none"])
    assert [name for name, text in found.items() if not text.strip()] == []
    assert with_secrets(found) == set()
    assert "127.0.0.1" in found["lineage"], "the source is told of, without its token"


def test_a_secret_that_is_given_away_is_found(
    everything: Callable[[Sequence[bytes]], Mapping[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: a function's error has one, and a table's name another."""
    monkeypatch.setenv("TABLE", f"{PLANTED}_numbers")
    found = with_secrets(everything([b"1", b"leaks"]))
    shown = {f"{call}{form}" for call in ("explain orders.py:topology", f"status {NAME}") for form in ("", " --json")}
    assert found >= shown | {"ledger", "lineage", "report", f"dead-letters list {NAME} --json", f"page {VIEWS[1]}"}


AWAY: Final = "127.0.0.1:1"
RAW: Final = (f"{PLANTED}/x", f"{PLANTED}?x", f"{PLANTED}#x", f"{PLANTED},x")
"""Passwords as people paste them: with characters that a URL reads otherwise."""
USERS: Final = (f"user:{PLANTED}", *(f"user:{raw}" for raw in RAW))


def nats(url: str) -> object:
    return NatsConsumer(url, "ORDERS", "x", "NATS stream ORDERS", 30, {}).stream()


def rabbitmq(url: str) -> object:
    said = limits_said(url, "auto", "orders", 1)
    assert PLANTED not in str(said)
    return BrokerQueue(url, "orders", "RabbitMQ queue orders").connect()


def redis(url: str) -> object:
    return Group(url, "orders", "x", "Redis stream orders").identity()


def postgres(url: str) -> object:
    return connect(Database.from_url(url), application_name="tests")


def lineage(url: str) -> object:
    return lineage_transport(Settings(lineage_url=SecretStr(url)))


def delta(url: str) -> object:
    return DeltaSink(url)


def endpoint(url: str) -> object:
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "aws_region": "x", "aws_allow_http": "true"}
    use_storage("s3://planted", {"aws_endpoint_url": url, **keys})
    return DeltaSink("s3://planted/orders").open(
        SinkIdentity("orders", "life", "x"), SinkInput(parse_schema("n long")), 1
    )


@pytest.mark.parametrize(
    ("connects", "url"),
    [
        *((endpoint, f"http://{user}@{AWAY}") for user in USERS),
        *((nats, f"nats://{user}@{AWAY}") for user in (PLANTED, *RAW, *USERS)),
        *((rabbitmq, f"amqp://{user}@{AWAY}/%2F") for user in USERS),
        *((redis, f"redis://{user}@{AWAY}/0") for user in USERS),
        (redis, f"redis://{AWAY}/0?password={PLANTED}"),
        *((postgres, f"postgresql://{user}@{AWAY}/shop") for user in USERS),
        *((lineage, url) for url in (f"user:{PLANTED}@{AWAY}", f"http//user:{PLANTED}@{AWAY}")),
        (delta, f"s3://user:{PLANTED}@bucket/orders"),
        (delta, f"abfss://c@shop.dfs.core.windows.net/orders?sv=2024&sig={PLANTED}"),
    ],
)
def test_no_error_of_a_connection_has_its_secret_and_neither_has_its_traceback(
    connects: Callable[[str], object], url: str
) -> None:
    with pytest.raises(StormproofError) as caught:
        connects(url)
    shown = "".join(traceback.format_exception(caught.value))
    quoted = [line for line in shown.splitlines() if PLANTED in line]
    assert (quoted, PLANTED in str(vars(caught.value))) == ([], False)


@pytest.mark.parametrize("user", [PLANTED, *RAW, *USERS])
def test_no_name_of_a_dataset_has_a_secret(user: str) -> None:
    sources = (
        NatsSource("orders", url=f"nats://{user}@host:1"),
        RabbitMQSource("orders", url=f"amqp://{user}@host:1/shop"),
        RedisStreamSource("orders", url=f"redis://{user}@host:1/2"),
    )
    assert PLANTED not in str([(source, source.datasets()) for source in sources])


def test_a_token_that_the_broker_refuses_is_not_shown(broker: Guarded) -> None:
    with pytest.raises(StormproofError, match="refuses the user") as caught:
        nats(broker.url.replace("-token", "-wrong"))
    assert PLANTED not in "".join(traceback.format_exception(caught.value))
