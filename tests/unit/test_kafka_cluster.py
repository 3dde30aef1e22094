"""A Kafka cluster that is not there: what is said of it."""

from __future__ import annotations

import pytest
from support.brokers import free_port

from stormproof.core.base.errors import StoreUnavailable
from stormproof.core.source.kafka.client import Asking, Cluster

pytest.importorskip("confluent_kafka")


def test_a_cluster_that_is_away_is_one_line_of_the_log_and_an_error_with_the_next_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    servers = f"127.0.0.1:{free_port()}"
    with pytest.raises(StoreUnavailable, match=f"{servers}.*see that the cluster runs, and that `servers` names it"):
        Asking(Cluster(servers, answer_s=0.5)).names()
    told = [record.getMessage() for record in caplog.records if record.name == "stormproof.kafka.client"]
    assert len([text for text in told if f"{servers}/bootstrap: Connect to" in text]) == 1
