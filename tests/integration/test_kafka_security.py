"""`KafkaSource` and a broker that asks for a password, or is encrypted: what is right works, what is wrong is named."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from support.brokers.kafka_listeners import SecuredKafka
from support.queues import prepared_database

from stormproof import KafkaSource, PostgresSink, Topology
from stormproof.core.base.errors import StoreUnavailable, StormproofError, UsageError
from stormproof.core.postgres.database import Database, connect
from stormproof.core.start.settings import Settings

pytestmark = [pytest.mark.postgres, pytest.mark.broker("kafka")]


def given(broker: SecuredKafka, how: str) -> dict[str, Any]:
    """Arguments of a source; how they differ from what is right, if they do."""
    password = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.username": broker.USER,
                "sasl.password": broker.PASSWORD}  # fmt: skip
    encrypted = {"security.protocol": "SSL", "ssl.ca.location": str(broker.certificate)}
    with_password = f"127.0.0.1:{broker.sasl_port}"
    with_ssl = f"127.0.0.1:{broker.ssl_port}"
    servers, client = {
        "password": (with_password, password),
        "encrypted": (with_ssl, encrypted),
        "wrong password": (with_password, {**password, "sasl.password": "wrong-horse-battery"}),
        "wrong mechanism": (with_password, {**password, "sasl.mechanism": "SCRAM-SHA-256"}),
        "unknown certificate": (with_ssl, {"security.protocol": "SSL"}),
        "no protocol": (with_password, {}),
    }[how]
    return {"servers": servers, "client": client, "answer_s": 3.0 if how == "no protocol" else 30.0}


@pytest.mark.parametrize("how", ["password", "encrypted"])
def test_right_credentials_are_passed_on_and_shown_nowhere(
    database: Database,
    tmp_path: Path,
    secured_kafka: SecuredKafka,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
    how: str,
) -> None:
    prepared_database(database)
    topic = secured_kafka.topic()
    secured_kafka.put(topic, [b"a", b"b"])
    caplog.set_level("DEBUG")
    source = KafkaSource(topic, database=database, **given(secured_kafka, how))
    topology = Topology("secured")
    topology.stream("lines", source).into(PostgresSink("applied", database=database))
    settings = Settings(database_url=database.adbc_uri, staging_dir=str(tmp_path), poll_interval_s=0.001)
    topology.run("exactly-once", engine="inline", until_idle=True, settings=settings)
    with connect(database, application_name="tests") as connection:
        assert connection.execute("select count(*) from applied").fetchone() == (2,)
        kept = [
            str(connection.execute(f"select array_agg(t::text) from {table} t".encode()).fetchone())
            for (table,) in connection.execute(
                "select format('%I.%I', schemaname, tablename) from pg_tables where schemaname like 'stormproof%'"
            ).fetchall()
        ]
    shown = [repr(source), str(vars(source)), repr(topology), caplog.text, *capfd.readouterr(), *kept]
    assert kept
    assert not [text for text in shown if secured_kafka.PASSWORD in text]


REFUSED: dict[str, tuple[type[StormproofError], str]] = {
    "wrong password": (UsageError, r"[Aa]uthentication failed.*Mend `client`"),
    "wrong mechanism": (UsageError, r"mechanism.*Mend `client`"),
    "unknown certificate": (UsageError, r"ssl.ca.location.*Mend `client`"),
    "no protocol": (StoreUnavailable, r"could not be listed at 127.0.0.1"),
}


@pytest.mark.parametrize("how", REFUSED)
def test_wrong_credentials_are_named_as_the_clients_settings(
    database: Database, secured_kafka: SecuredKafka, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    prepared_database(database)
    arguments = given(secured_kafka, how)
    source = KafkaSource("t", database=database, **arguments)
    kind, text = REFUSED[how]
    began_s = time.monotonic()
    with pytest.raises(kind, match=text) as raised:
        source.subscribe("s", 1)
    source.close()
    assert time.monotonic() - began_s < 20, "a refusal was told when the time for an answer was over, and not before"
    secret = arguments["client"].get("sasl.password", "none given")
    assert secret not in f"{raised.value} {raised.value.details} {caplog.text}"
