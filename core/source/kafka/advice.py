"""Offsets for a consumer group, so that Kafka's own tools show how far a source is: advice, which nothing here reads."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from stormproof.core.errors import StormproofError
from stormproof.core.source.kafka.cluster import Cluster, Partition

if TYPE_CHECKING:
    from confluent_kafka import Consumer

log = logging.getLogger("stormproof.kafka")


class GroupAdvice:
    """Commits offsets to a group; what cannot be committed is logged, once for each run of failures."""

    def __init__(self, cluster: Cluster, group: str | None) -> None:
        self._cluster = cluster
        self._group = group
        self._consumer: Consumer | None = None
        self._made_in = 0
        self._told: dict[Partition, int] = {}
        self._failing = False

    def tell(self, applied: Mapping[Partition, int]) -> None:
        """Commit the offsets that have changed; the answer is not waited for."""
        if self._group is None:
            return
        from confluent_kafka import KafkaException, TopicPartition

        changed = {one: offset for one, offset in applied.items() if self._told.get(one) != offset}
        if not changed:
            if self._consumer is not None and self._made_in == os.getpid():
                self._consumer.poll(0)
            return
        if self._consumer is None or self._made_in != os.getpid():
            self._consumer, self._made_in = self._cluster.consumer(self._group, self._heard), os.getpid()
        try:
            self._consumer.commit(offsets=[TopicPartition(*one, offset) for one, offset in changed.items()])
            self._consumer.poll(0)
        except KafkaException as error:
            self._log(error.args[0])
        else:
            self._told.update(changed)

    def _heard(self, error: Any, offsets: Any) -> None:
        del offsets
        if error is None:
            self._failing = False
        else:
            self._told.clear()
            self._log(error)

    def _log(self, error: Any) -> None:
        if not self._failing:
            self._failing = True
            log.warning(
                "offsets could not be committed to consumer group %s at %s, so tools that look there show an old lag; "
                "nothing else depends on it: %s",
                self._group,
                self._cluster.servers,
                self._cluster.without_secrets(str(error)),
            )

    def close(self) -> None:
        """Wait for offsets on their way, and let the connection go."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None and self._made_in == os.getpid():
            with suppress(StormproofError, RuntimeError):
                consumer.close()
