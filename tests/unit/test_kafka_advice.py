"""Offsets for a consumer group: the newest are the last that it is told, whenever answers come."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormproof.core.source.kafka.advice import LAST_POLLS, POLL_S, GroupAdvice
from stormproof.core.source.kafka.client import Cluster

pytest.importorskip("confluent_kafka")
ONE, TWO = ("lines", 0), ("lines", 1)
Offsets = dict[tuple[str, int], int]


@dataclass
class Group:
    """A consumer group behind a client that sends what it was given in any order, as one without a coordinator may."""

    committed: Offsets = field(default_factory=dict)
    refused: frozenset[tuple[str, int]] = frozenset()
    """Partitions whose offsets it does not take."""
    away: bool = False
    """Nothing is answered."""
    sent: list[Offsets] = field(default_factory=list)
    """What is on its way."""
    most: int = 0
    """How many commits were on their way at once."""
    closed: bool = False
    waited_s: float = 0.0
    heard: Callable[[Any, Any], None] | None = None

    def commit(self, offsets: Sequence[Any]) -> None:
        self.sent.append({(one.topic, one.partition): one.offset for one in offsets})
        self.most = max(self.most, len(self.sent))

    def poll(self, wait_s: float) -> None:
        """The last that was sent arrives first, where the client waits for an answer."""
        self.waited_s += wait_s
        if wait_s and self.sent and not self.away:
            self.arrive(-1)

    def arrive(self, which: int, error: object = None) -> None:
        """One of those on their way is answered."""
        offsets = self.sent.pop(which)
        taken = {} if error else {one: at for one, at in offsets.items() if one not in self.refused}
        self.committed |= taken
        assert self.heard is not None
        self.heard(
            error,
            [
                SimpleNamespace(topic=one[0], partition=one[1], error=None if one in taken else error or "refused")
                for one in offsets
            ],
        )

    def close(self) -> None:
        self.closed = True


def advice_for(group: Group, monkeypatch: pytest.MonkeyPatch, kind: type[GroupAdvice] = GroupAdvice) -> GroupAdvice:
    def consumer(_: Cluster, name: str | None, heard: Callable[[Any, Any], None]) -> Group:
        assert name == "lag"
        group.heard = heard
        return group

    monkeypatch.setattr(Cluster, "consumer", consumer)
    return kind(Cluster("localhost:9"), "lag")


@given(
    steps=st.lists(st.one_of(st.integers(1, 3), st.sampled_from(["answer", "error"])), max_size=30),
    refused=st.booleans(),
)
def test_the_group_ends_at_the_last_offsets_in_whatever_order_answers_come(
    steps: list[int | str], refused: bool
) -> None:
    group = Group(refused=frozenset({TWO}) if refused else frozenset())
    at = 0
    with pytest.MonkeyPatch.context() as monkeypatch:
        advice = advice_for(group, monkeypatch)
        for step in [1, *steps]:
            if isinstance(step, int):
                at += step
                advice.tell({ONE: at, TWO: at})
            elif group.sent:
                group.arrive(-1, None if step == "answer" else "gone")
        advice.finish()
        advice.close()
    assert group.most == 1
    assert group.committed == ({ONE: at} if refused else {ONE: at, TWO: at})
    assert group.closed


class Hasty(GroupAdvice):
    """Waits for no answer."""

    def tell(self, applied: Mapping[tuple[str, int], int]) -> None:
        super().tell(applied)
        self._sent = {}


def test_a_client_that_sends_the_older_of_two_last_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: two commits on their way at once leave the group at the older offsets."""
    group = Group()
    advice = advice_for(group, monkeypatch, Hasty)
    for offset in (1, 2):
        advice.tell({ONE: offset})
    while group.sent:
        group.arrive(-1)
    assert group.committed == {ONE: 1}


def test_offsets_that_were_refused_are_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(refused=frozenset({TWO}))
    advice = advice_for(group, monkeypatch)
    advice.tell({ONE: 5, TWO: 5})
    group.arrive(0)
    group.refused = frozenset()
    advice.tell({ONE: 5, TWO: 5})
    assert group.sent == [{TWO: 5}]


def test_a_cluster_that_does_not_answer_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group(away=True)
    advice = advice_for(group, monkeypatch)
    advice.tell({ONE: 5})
    advice.finish()
    assert group.waited_s == pytest.approx(LAST_POLLS * POLL_S)


def test_what_is_as_it_was_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    group = Group()
    advice = advice_for(group, monkeypatch)
    advice.tell({ONE: 5})
    group.arrive(0)
    advice.tell({ONE: 5})
    assert not group.sent
