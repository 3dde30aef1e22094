"""The servers' ids of messages: of the journals' stable ids, of Kafka's places, and of several spouts."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import pytest

from stormproof.core.base.errors import Json, UsageError
from stormproof.core.contract.source import Backlog
from stormproof.core.pending.connector import Finding
from stormproof.core.source.kafka.position import KafkaPosition, PartitionPlace
from stormproof.core.source.kafka.source import KafkaSource
from stormproof.core.source.memory import MemorySource
from stormproof.core.source.rabbitmq import RabbitMQStreamSource
from stormproof.trident.audit.evidence import GroupEvidence, SourceEvidence
from stormproof.trident.ledger.tables import Txn


class Ids(SourceEvidence):
    """A source whose server has these ids, by their shown ones."""

    def __init__(self, ids: Mapping[str, str]) -> None:
        self._ids = ids

    @property
    def name(self) -> str:
        return "ids"

    def named(self, message: str) -> str:
        found = [shown for shown, id_ in self._ids.items() if message in (shown, id_, f"={id_}")]
        if not found:
            raise UsageError(f"message {message}: there is none on record")
        return found[0]

    def server_ids(self, messages: Collection[str]) -> Mapping[str, str]:
        return {one: self._ids[one] for one in messages if one in self._ids}

    def backlog(self) -> Backlog:
        raise NotImplementedError

    def contains(self, position: Mapping[str, Json], message: str) -> bool:
        raise NotImplementedError

    def slice_findings(self, txns: Sequence[Txn], forgotten: Sequence[Txn] = ()) -> list[Finding]:
        raise NotImplementedError


GROUP = GroupEvidence("a+b", {"a": Ids({"0-0": "5-0", "0-1": "both"}), "b": Ids({"0-0": "m:1", "0-1": "both"})})


def test_of_several_spouts_a_servers_id_is_found_with_its_spout_and_without() -> None:
    assert [GROUP.named(given) for given in ("a:5-0", "5-0", "=5-0", "a:0-0")] == ["a:0-0"] * 4
    assert [GROUP.named(given) for given in ("b:m:1", "m:1")] == ["b:0-0"] * 2
    assert GROUP.named("b:both") == "b:0-1"
    for given in ("both", "never", "c:0-0", "0-0"):
        with pytest.raises(UsageError, match="SPOUT:ID"):
            GROUP.named(given)
    asked = ["a:0-0", "b:0-0", "b:0-9", "c:0-0", "0-0"]
    assert GROUP.server_ids(asked) == {"a:0-0": "5-0", "b:0-0": "m:1"}


def test_kafkas_own_ids_name_topic_partition_and_offset() -> None:
    places = (PartitionPlace("or-ders", 3, 0, 9), PartitionPlace("clicks@eu", 0, 0, 9))
    position = KafkaPosition("cluster", {}, places).to_json()
    for given, shown in (("or-ders-3@7", "0-7"), ("clicks@eu-0@0", "1-0"), (f"clicks@eu-0@{2**40}", f"1-{2**40}")):
        found = KafkaSource.by_server_id(position, given)
        assert found == KafkaSource.number_of(shown)
        assert found is not None
        assert KafkaSource.server_ids(position, [found]) == {found: given}
    for never in ("or-ders-3@07", "or-ders-3@", "or-ders-3", "or-ders-4@7", "@7", f"or-ders-3@{2**48}", "or-ders-3@-7"):
        assert KafkaSource.by_server_id(position, never) is None


@pytest.mark.parametrize(
    "text", ["", "-", "0", "0-", "-0", "0-00", "00-0", "0-\u0660", " 0-0", "0-0\n", "0--1", f"0-{2**63}", "9" * 5_000]
)
def test_a_shown_id_has_one_form(text: str) -> None:
    for source in (KafkaSource, RabbitMQStreamSource):
        assert source.number_of(text) is None
    assert MemorySource.number_of(text) == ((0, 0) if text == "0" else None)
    assert RabbitMQStreamSource.number_of("1-0") is None, "a stream's messages have the origin 0"
    assert RabbitMQStreamSource.number_of("0-1") == (1, 0)
