"""Offsets for a consumer group, so that Kafka's own tools show how far a source is: advice, by which nothing is read."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from stormproof.core.base.errors import StormproofError
from stormproof.core.source.kafka.client import Cluster, Partition

if TYPE_CHECKING:
    from confluent_kafka import Consumer

log = logging.getLogger("stormproof.kafka")


LAST_POLLS: Final = 100
"""How often `GroupAdvice.finish` asks for an answer that is still out: no message depends on what it would say."""
POLL_S: Final = 0.1
"""How long it waits for one, each time."""


class GroupAdvice:
    """Commits offsets to a group; what cannot be committed is logged, once for each run of failures.

    One commit at a time is on its way: of two, a client that still looks for the group's coordinator may send the older
    one last, and the group would stay at its offsets.
    """

    def __init__(self, cluster: Cluster, group: str | None) -> None:
        self._cluster = cluster
        self._group = group
        self._consumer: Consumer | None = None
        self._made_in = 0
        self._wanted: dict[Partition, int] = {}
        self._told: dict[Partition, int] = {}
        self._sent: dict[Partition, int] = {}
        self._failing = False

    def tell(self, applied: Mapping[Partition, int]) -> None:
        """Commit the offsets that have changed; the answer is not waited for.

        Where an answer is still out, they are committed by a later call, or by `finish`.
        """
        if self._group is None:
            return
        self._wanted = dict(applied)
        if self._made_in != os.getpid():
            self._consumer, self._sent = None, {}  # a parent's, whose answers never come here
        if self._consumer is None and self._changed:
            self._consumer, self._made_in = self._cluster.consumer(self._group, self._heard), os.getpid()
        if self._consumer is not None:
            self._consumer.poll(0)
            self._send(self._consumer)

    @property
    def _changed(self) -> dict[Partition, int]:
        return {one: offset for one, offset in self._wanted.items() if self._told.get(one) != offset}

    def _send(self, consumer: Consumer) -> None:
        from confluent_kafka import KafkaException, TopicPartition

        changed = self._changed
        if self._sent or not changed:
            return
        try:
            consumer.commit(offsets=[TopicPartition(*one, offset) for one, offset in changed.items()])
        except KafkaException as error:
            self._log(error.args[0])
        else:
            self._sent = changed
            consumer.poll(0)

    def _heard(self, error: Any, offsets: Any) -> None:
        """The answer to what was sent: for all of it, or by partition."""
        sent, self._sent = self._sent, {}
        refused = {(one.topic, one.partition): one.error for one in offsets or () if one.error is not None}
        if error is None and not refused:
            self._failing = False
        else:
            self._log(error or next(iter(refused.values())))
        for one, offset in sent.items():
            if error is None and one not in refused:
                self._told[one] = offset
            else:
                self._told.pop(one, None)

    def _log(self, error: Any) -> None:
        if not self._failing:
            self._failing = True
            log.warning(
                "offsets could not be committed to consumer group %s at %s, so tools that look there show an old lag; "
                "a compaction may leave what cannot be told; nothing else depends on it: %s",
                self._group,
                self._cluster.servers,
                self._cluster.without_secrets(str(error)),
            )

    def finish(self) -> None:
        """At the end of a run: wait for each answer, at most `LAST_POLLS` x `POLL_S`, and commit the last offsets."""
        consumer = self._consumer
        if consumer is None or self._made_in != os.getpid():
            return
        with suppress(StormproofError, RuntimeError):
            if self._answered(consumer):
                self._send(consumer)
                self._answered(consumer)

    def _answered(self, consumer: Consumer) -> bool:
        for _ in range(LAST_POLLS):
            if not self._sent:
                break
            consumer.poll(POLL_S)
        return not self._sent

    def close(self) -> None:
        """Let the connection go, and with it what was not told."""
        consumer, self._consumer = self._consumer, None
        self._sent = {}
        if consumer is not None and self._made_in == os.getpid():
            with suppress(StormproofError, RuntimeError):
                consumer.close()
