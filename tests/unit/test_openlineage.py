"""Lineage: one run a batch with an id of its own, throttled, checked against OpenLineage's classes, never in the way."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import attr
import pytest
from openlineage.client import facet_v2
from openlineage.client.event_v2 import RunEvent
from openlineage.client.generated import base
from openlineage.client.naming import dataset as naming
from openlineage.client.serde import Serde
from support import lineage_rules
from support.brokers import until

from stormproof import DeltaSink, PostgresQueue, PostgresSink
from stormproof.core.base.clock import ManualClock
from stormproof.core.base.dataset import DatasetName, at_path
from stormproof.core.base.errors import SettingsError
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Expectation, Slice, Source
from stormproof.core.postgres.database import Database
from stormproof.core.source.kafka import KafkaSource
from stormproof.core.source.kestrel import KestrelSource
from stormproof.core.source.nats import NatsSource
from stormproof.core.source.rabbitmq import RabbitMQSource, RabbitMQStreamSource
from stormproof.core.source.redis_streams import RedisStreamSource
from stormproof.core.start.settings import Settings
from stormproof.trident.telemetry.lineage import (
    LineageReporter,
    OutputTable,
    StormproofRunFacet,
    Told,
    driver_run_id,
    run_id,
)
from stormproof.trident.telemetry.recorder import Emitter, lineage_transport
from stormproof.trident.terms.observers import CommittedBatch, SinkEnd
from stormproof.trident.terms.transaction_states import AttemptOutcome, TxnCause, TxnState

SLICE: Final = Slice({}, Expectation(5, 0), 100)


class Told1:
    """A reporter, its clock, and what it told."""

    def __init__(self, epoch: int = 1, interval_s: float = 30.0, *, error_texts: bool = False) -> None:
        self.clock = ManualClock()
        self.events: list[RunEvent] = []
        self.merged = 0
        told = Told(
            *("shop", "words", "life", epoch, "exactly-once", True),
            (DatasetName("kafka://broker:9092", "lines"),),
            {"delta": OutputTable(DatasetName("file", "/lake/words"), (("word", "string"),))},
        )
        self.reporter = LineageReporter(
            *(told, self.events.append, self.clock),
            interval_s=interval_s,
            error_texts=error_texts,
            merged=self._merge,
        )

    def _merge(self) -> None:
        self.merged += 1

    def open(self, txid: int) -> None:
        self.reporter.opened(txid, Guarantee.EXACTLY_ONCE, SLICE)

    def commit(self, txid: int, version: str = "7") -> None:
        end = SinkEnd(7, 70, version=version)
        self.reporter.committed(CommittedBatch(txid, Guarantee.EXACTLY_ONCE, 5, {"delta": end}))

    @property
    def said(self) -> list[tuple[str, int]]:
        return [(str(one["eventType"]), one["run"]["facets"]["stormproof"]["txid"]) for one in self.json]

    @property
    def json(self) -> list[dict[str, Any]]:
        return [Serde.to_dict(event) for event in self.events]


def test_a_batch_is_a_run_with_what_it_read_and_wrote() -> None:
    told = Told1()
    told.open(1)
    told.commit(1)
    start, complete = told.json
    assert (start["eventType"], complete["eventType"]) == ("START", "COMPLETE")
    assert start["run"]["runId"] == complete["run"]["runId"] == run_id("life", 1)
    assert complete["run"]["facets"]["parent"]["run"]["runId"] == driver_run_id("life", 1)
    assert complete["job"]["facets"]["jobType"]["processingType"] == "STREAMING"
    (input_,), (output,) = complete["inputs"], complete["outputs"]
    assert (input_["namespace"], input_["name"]) == ("kafka://broker:9092", "lines")
    assert (
        output["outputFacets"]["outputStatistics"] | {"rowCount": 7, "size": 70}
        == (output["outputFacets"]["outputStatistics"])
    )
    assert output["facets"]["version"]["datasetVersion"] == "7"
    assert output["facets"]["schema"]["fields"][0]["name"] == "word"


def test_a_replay_after_a_crash_tells_of_the_same_run() -> None:
    before, after = Told1(epoch=1), Told1(epoch=2)
    before.open(1)
    after.commit(1)  # rolled forward by recovery
    (begun,), (*_, ended) = before.json, after.json
    assert ended["eventType"] == "COMPLETE"
    assert begun["run"]["runId"] == ended["run"]["runId"]
    assert begun["run"]["facets"]["parent"]["run"]["runId"] != ended["run"]["facets"]["parent"]["run"]["runId"]


def test_two_batches_and_two_lives_have_runs_of_their_own() -> None:
    assert len({run_id("life", 1), run_id("life", 2), run_id("other", 1), driver_run_id("life", 1)}) == 4


def test_batches_between_two_that_are_told_of_are_summed_up() -> None:
    told = Told1()
    for txid in range(1, 101):
        told.open(txid)
        told.commit(txid, version=str(txid))
        told.clock.advance(1)
    told.reporter.close()
    ends = [one for one in told.json if one["eventType"] == "COMPLETE"]
    assert len(ends) <= 100 / 30 + 2
    facets = [one["run"]["facets"]["stormproof"] for one in ends]
    assert sum(facet["batches"] for facet in facets) == 100
    assert sum(facet["messages"] for facet in facets) == 500
    assert sum(one["outputs"][0]["outputFacets"]["outputStatistics"]["rowCount"] for one in ends) == 700
    assert [facet["firstTxid"] for facet in facets[1:]] == [facet["txid"] + 1 for facet in facets[:-1]]
    assert told.merged >= 100 - len(ends)


def test_every_failure_is_told_of_at_once() -> None:
    told = Told1(interval_s=1e9)
    for txid in (1, 2, 3):
        told.open(txid)
    told.reporter.given_up(2, TxnState.ABORTED, TxnCause.JOB_FAILED, "quotes a secret")
    told.reporter.attempt_ended(3, 1, AttemptOutcome.MOOT)
    told.reporter.blocked(3, "delta", TxnCause.TABLE_GONE, "quotes a secret")
    assert told.said == [("START", 1), ("START", 2), ("ABORT", 2), ("START", 3), ("FAIL", 3)]
    failed = told.json[-1]["run"]["facets"]
    assert (failed["errorMessage"]["message"], failed["stormproof"]["attempts"]) == ("table_gone", 2)
    assert "secret" not in str(told.json)


def test_the_text_of_an_error_is_told_where_it_was_asked_for() -> None:
    told = Told1(error_texts=True)
    told.open(1)
    told.reporter.given_up(1, TxnState.ABORTED, TxnCause.JOB_FAILED, "no disk")
    assert told.json[-1]["run"]["facets"]["errorMessage"]["message"] == "job_failed: no disk"


def test_every_run_that_was_begun_is_ended_once() -> None:
    told = Told1(interval_s=3.0)
    for txid in range(1, 60):
        told.open(txid)
        told.clock.advance(0.7)
        if txid % 7 == 0:
            told.reporter.given_up(txid, TxnState.ABORTED, TxnCause.UNVERIFIED, "")
        else:
            told.commit(txid)
    told.reporter.close()
    begun = Counter(txid for kind, txid in told.said if kind == "START")
    ended = Counter(txid for kind, txid in told.said if kind != "START")
    assert begun == ended
    assert set(begun.values()) == {1}


# ---- by OpenLineage's own classes, which its project makes of the public schemas


def faults(event: dict[str, Any]) -> list[str]:
    """Where an event is not what the classes of OpenLineage's client say: keys that are missing, or unknown."""
    found = _faults(event, base.RunEvent, "event") + _faults(event["run"], base.Run, "run")
    found += _faults(event["job"], base.Job, "job")
    for kind, class_ in (("inputs", base.InputDataset), ("outputs", base.OutputDataset)):
        for one in event[kind]:
            found += _faults(one, class_, kind)
            found += _of_facets({**one.get("facets", {}), **one.get("outputFacets", {})})
    return found + _of_facets({**event["run"]["facets"], **event["job"]["facets"]})


def _of_facets(facets: dict[str, Any]) -> list[str]:
    found: list[str] = []
    for name, facet in facets.items():
        class_ = _facets().get(facet["_schemaURL"])
        found += [f"{name} has an unknown schema"] if class_ is None else _faults(facet, class_, name)
    return found


def _facets() -> dict[str, Any]:
    modules = [module for module in vars(facet_v2).values() if hasattr(module, "__file__")]
    classes = [one for module in modules for one in vars(module).values() if isinstance(one, type)]
    known = [one for one in (*classes, StormproofRunFacet) if issubclass(one, base.BaseFacet)]
    return {one._get_schema(): one for one in known}  # pyright: ignore[reportPrivateUsage]


def _faults(found: dict[str, Any], class_: Any, what: str) -> list[str]:
    fields = {field.name: field for field in attr.fields(class_)}
    needed = {name for name, field in fields.items() if field.default is attr.NOTHING}
    return [f"{what} has no {name}" for name in sorted(needed - found.keys())] + [
        f"{what} has an unknown {name}" for name in sorted(found.keys() - fields.keys())
    ]


def test_events_are_what_openlineages_classes_say() -> None:
    told = Told1()
    told.open(1)
    told.commit(1)
    told.open(2)
    told.reporter.blocked(2, "delta", TxnCause.TABLE_GONE, "")
    assert len(told.json) == 4
    for event in told.json:
        assert faults(event) == []


def test_every_kind_of_event_is_what_the_specification_demands() -> None:
    told = Told1(error_texts=True)
    for txid in (1, 2, 3):
        told.open(txid)
    told.commit(1)
    told.reporter.given_up(2, TxnState.ABORTED, TxnCause.JOB_FAILED, "no disk")
    told.reporter.blocked(3, "delta", TxnCause.TABLE_GONE, "no table")
    assert {kind for kind, _ in told.said} == {"START", "COMPLETE", "ABORT", "FAIL"}
    assert [fault for event in told.json for fault in lineage_rules.faults(event)] == []


BROKEN: Final[dict[str, Callable[[dict[str, Any]], object]]] = {
    "run: 'runId' is a required property": lambda event: event["run"].pop("runId"),
    "run.runId: 'one' is not a 'uuid'": lambda event: event["run"].update(runId="one"),
    "eventTime: '2026-01-01T00:00:00' is not a 'date-time'": lambda event: event.update(
        eventTime="2026-01-01T00:00:00"
    ),
    "eventType: 'DONE' is not one of": lambda event: event.update(eventType="DONE"),
    "producer: 'us' is not a 'uri'": lambda event: event.update(producer="us"),
    "outputs.0: 'name' is a required property": lambda event: event["outputs"][0].pop("name"),
    "outputs.0.outputFacets.outputStatistics.rowCount: '7' is not of type 'integer'": (
        lambda event: event["outputs"][0]["outputFacets"]["outputStatistics"].update(rowCount="7")
    ),
    "job.facets.jobType: Additional properties are not allowed ('kind' was unexpected)": (
        lambda event: event["job"]["facets"]["jobType"].update(kind="x")
    ),
    "run.facets.parent: '_schemaURL' is a required property": (
        lambda event: event["run"]["facets"]["parent"].pop("_schemaURL")
    ),
    "run.facets.stormproof.txid: 0 is less than the minimum": (
        lambda event: event["run"]["facets"]["stormproof"].update(txid=0)
    ),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_an_event_that_breaks_the_specification_is_seen(fault: str) -> None:
    """Negative control."""
    told = Told1()
    told.open(1)
    told.commit(1)
    event = told.json[-1]
    BROKEN[fault](event)
    (found,) = lineage_rules.faults(event)
    assert found.startswith(fault)


def test_an_event_that_lacks_something_is_seen() -> None:
    """Negative control."""
    told = Told1()
    told.open(1)
    (event,) = told.json
    del event["run"]["runId"]
    event["job"]["facets"]["jobType"]["kind"] = "x"
    assert faults(event) == ["run has no runId", "jobType has an unknown kind"]


# ---- names

SHOP: Final = "postgresql://ann:hidden@host:5433/shop"


def read_by(source: Source) -> DatasetName:
    (dataset,) = source.datasets()
    return dataset


@pytest.mark.parametrize(
    ("found", "rule"),
    [
        (at_path("/lake/words"), naming.LocalFileSystem("/lake/words")),
        (at_path("s3a://bucket/lake/words/"), naming.S3("bucket", "lake/words")),
        (at_path("gs://bucket/lake/words"), naming.GCS("bucket", "lake/words")),
        (at_path("abfs://files@shop.dfs.core.windows.net/lake"), naming.ABFSS("files", "shop", "lake")),
        (read_by(KafkaSource("lines", servers="one:9093,two:9092")), naming.Kafka("one", "9093", "lines")),
        (read_by(KafkaSource("lines", servers="one")), naming.Kafka("one", "9092", "lines")),
        (
            PostgresSink("words", database=SHOP).dataset,
            naming.Postgres("host", "5433", "shop", "public", "words"),
        ),
        (
            PostgresSink("a.words", database="postgresql://ann:hidden@host/shop").dataset,
            naming.Postgres("host", "5432", "shop", "a", "words"),
        ),
        (
            PostgresSink("words", database="postgresql://ann:hidden@one:1,two:2/shop").dataset,
            naming.Postgres("one", "1", "shop", "public", "words"),
        ),
        (
            PostgresSink("words", database="postgresql:///shop?host=/run/shop&user=ann").dataset,
            naming.Postgres("%2Frun%2Fshop", "5432", "shop", "public", "words"),
        ),
        (DeltaSink("/lake/words").dataset, naming.LocalFileSystem("/lake/words")),
        (
            read_by(PostgresQueue("lines", database=SHOP)),
            naming.Postgres("host", "5433", "shop", "stormproof_queue", "lines"),
        ),
    ],
)
def test_datasets_are_named_by_openlineages_rules_and_without_secrets(
    found: DatasetName, rule: naming.DatasetNaming
) -> None:
    assert found == DatasetName(rule.get_namespace(), rule.get_name())


AMQP: Final = "amqp://ann:hidden@host:5673"


@pytest.mark.parametrize(
    ("found", "namespace", "name"),
    [
        (read_by(RabbitMQSource("lines", url=AMQP)), "amqp://host:5673", "lines"),
        (read_by(RabbitMQSource("lines", url=f"{AMQP}/%2F")), "amqp://host:5673", "lines"),
        (read_by(RabbitMQSource("lines", url=f"{AMQP}/shop")), "amqp://host:5673", "shop/lines"),
        (read_by(RabbitMQStreamSource("lines", url="amqps://ann:hidden@host/a")), "amqp://host:5671", "a/lines"),
        (read_by(RedisStreamSource("lines", url="redis://:hidden@host/0")), "redis://host:6379", "lines"),
        (read_by(RedisStreamSource("lines", url="rediss://:hidden@host:1/2")), "redis://host:1", "2/lines"),
        (read_by(RedisStreamSource("lines", url="redis://host?db=3&password=hidden")), "redis://host:6379", "3/lines"),
        (read_by(NatsSource("lines", url="nats://ann:hidden@host")), "nats://host:4222", "lines"),
        (read_by(KestrelSource("lines", hosts=["host:22133"])), "kestrel://host:22133", "lines"),
    ],
)
def test_brokers_without_a_rule_are_named_alike_and_no_two_queues_have_one_name(
    found: DatasetName, namespace: str, name: str
) -> None:
    assert found == DatasetName(namespace, name)


def test_no_secret_of_a_database_is_in_its_name() -> None:
    database = Database.from_url("postgresql://ann:hidden@/shop?host=/tmp/socket&sslpassword=hidden")
    assert "hidden" not in str(database.dataset("public.words"))


# ---- sending


class Server:
    """A transport that may fail, or stand still."""

    def __init__(self) -> None:
        self.taken: list[Any] = []
        self.fails = False
        self.goes = threading.Event()
        self.goes.set()

    def emit(self, event: Any) -> None:
        self.goes.wait(60)
        if self.fails:
            raise ConnectionError("https://ann:hidden@server")
        self.taken.append(event)


def test_a_server_that_stands_still_holds_up_nobody_and_drops_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    server, counts = Server(), Counter[str]()
    server.goes.clear()
    emitter = Emitter(server, lambda what: counts.update([what]), waiting_max=3)
    for number in range(10):
        emitter.emit(number)
    assert counts["dropped"] >= 6
    emitter.close(within_s=0.0)
    server.goes.set()
    assert counts == {"dropped": 10}
    assert "were not sent within 0 s of the end, and are dropped" in caplog.text
    until(lambda: server.taken != [], "the event under way was not sent in the end")
    assert counts == {"dropped": 10}


def test_a_server_that_fails_is_logged_once_without_its_address(caplog: pytest.LogCaptureFixture) -> None:
    server, counts = Server(), Counter[str]()
    server.fails = True
    emitter = Emitter(server, lambda what: counts.update([what]))
    for number in range(3):
        emitter.emit(number)
    until(lambda: counts["failed"] == 3, "the events did not fail")
    server.fails = False
    emitter.emit(4)
    emitter.close()
    assert (server.taken, counts["sent"]) == ([4], 1)
    assert len(caplog.records) == 1
    assert "hidden" not in caplog.text


def test_events_go_to_a_file_one_a_line(tmp_path: Path) -> None:
    told = Told1()
    told.open(1)
    told.commit(1)
    emitter = Emitter(lineage_transport(Settings(lineage_file=tmp_path / "events")), lambda _: None)
    for event in told.events:
        emitter.emit(event)
    emitter.close()
    assert [json.loads(line) for line in (tmp_path / "events").read_text().splitlines()] == told.json


def test_a_file_that_cannot_be_written_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"nowhere/events cannot be written: No such file"):
        lineage_transport(Settings(lineage_file=tmp_path / "nowhere" / "events"))


def test_settings_do_not_show_secrets_of_lineage() -> None:
    settings = Settings(lineage_url="https://ann:hidden@server", lineage_api_key="hidden")
    assert "hidden" not in repr(settings)
