"""What a Kafka cluster answers when it is asked for offsets: an answer without one is no offset."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any

import pytest

from stormproof.core.base.errors import StoreUnavailable
from stormproof.core.source.kafka.client import Asking, Cluster

PARTITIONS = [("lines", 0), ("lines", 1)]
INVALID = -1001
"""What librdkafka has where no answer came."""


class Answers:
    """A client that gives these offsets, by partition; those of the end are always 7."""

    def __init__(self, offsets: list[int]) -> None:
        self._offsets = offsets

    def list_offsets(self, wanted: dict[Any, Any], **_: object) -> dict[Any, Any]:
        latest = any(type(spec).__name__ == "LatestSpec" for spec in wanted.values())
        given = {
            one: 7 if latest and self._offsets[one.partition] != INVALID else self._offsets[one.partition]
            for one in wanted
        }
        return {
            one: SimpleNamespace(result=lambda offset=offset: SimpleNamespace(offset=offset, leader_epoch=None))
            for one, offset in given.items()
        }

    def poll(self, _: float) -> None:
        """Nothing is heard."""


def asking(*offsets: int) -> Asking:
    made = Asking(Cluster("localhost:9"))
    made.__dict__.update(_admin=Answers([*offsets]), _made_in=os.getpid())
    return made


@pytest.mark.parametrize("which", ["earliest", "ends", "at_time"])
def test_an_answer_without_an_offset_is_asked_for_again(which: str) -> None:
    """A position of -1001 would be taken for messages that retention removed, and by time for the partition's end."""
    ask = asking(3, INVALID)
    with pytest.raises(StoreUnavailable, match="no answer for partition 1 of topic lines"):
        ask.at_time(PARTITIONS, datetime(2026, 1, 1, tzinfo=UTC)) if which == "at_time" else getattr(ask, which)(
            PARTITIONS
        )


def test_where_no_message_is_as_late_the_end_is_meant() -> None:
    assert asking(3, -1).at_time(PARTITIONS, datetime(2026, 1, 1, tzinfo=UTC)) == {("lines", 0): 3, ("lines", 1): 7}


@pytest.mark.parametrize("which", ["earliest", "ends"])
def test_a_negative_offset_is_none_where_no_time_was_given(which: str) -> None:
    with pytest.raises(StoreUnavailable, match="no answer for partition 0"):
        getattr(asking(-1 if which == "earliest" else INVALID, 3), which)(PARTITIONS)


def test_offsets_are_given_as_they_are() -> None:
    assert asking(0, 5).earliest(PARTITIONS) == {("lines", 0): 0, ("lines", 1): 5}
