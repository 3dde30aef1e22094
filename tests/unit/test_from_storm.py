"""docs/from_storm.md: its test runs, and the names that it gives for Storm's exist."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import stormproof.errors
import stormproof.topology
from stormproof.core.bolt import Bolt
from stormproof.core.graph.components import OutputStream
from stormproof.core.start.settings import Settings
from stormproof.testing import Fault, FaultKind, Faults, Simulation
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.terms.observers import BatchResult, RunStatistics

PAGE = (Path(__file__).parents[2] / "docs" / "from_storm.md").read_text()
SETTINGS = ["parallelism", "master", "poll_interval_s", "message_timeout_s", "batch_messages", "batch_bytes"]


def names_of_the_page() -> dict[str, Any]:
    (block,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    names: dict[str, Any] = {"__name__": "page"}
    exec(compile(block, "from_storm.md", "exec"), names)  # noqa: S102 - our own page
    return names


def test_the_pages_own_test_passes() -> None:
    names_of_the_page()["test_words_are_there_once_whatever_dies"]()


def test_control_it_fails_where_a_crash_doubles_rows() -> None:
    names = names_of_the_page()
    test, simulate = names["test_words_are_there_once_whatever_dies"], names["simulate"]
    after_the_sink = Faults(at=(Fault(FaultKind.DRIVER_DEATH, "commit.after_sink"),))

    def crashing(*args: Any, **options: Any) -> Simulation:
        made: Simulation = simulate(*args, **{**options, "faults": after_the_sink}, guarantee=guarantee)
        return made

    names["simulate"] = crashing
    guarantee = "exactly-once"
    test()
    guarantee = "at-least-once"
    with pytest.raises(AssertionError):
        test()


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_are_named_exist(name: str) -> None:
    assert f"`{name}`" in PAGE
    assert name in Settings.model_fields


@pytest.mark.parametrize(
    ("owner", "names"),
    [
        (stormproof, ["Bolt", "BasicBolt", "FailTuple", "IteratorSource", "MemorySource", "KafkaSource"]),
        (stormproof, ["BoltContext", "RunStatistics"]),
        (stormproof.errors, ["TopologyError"]),
        (stormproof.topology, ["BatchResult"]),
        (Bolt, ["prepare", "execute", "finish", "cleanup"]),
        (OutputStream, ["shuffle", "fields", "partial_key", "all", "global_", "none", "local_or_shuffle", "direct"]),
        (Simulation, ["emitted", "messages"]),
        (RunStatistics, ["failed_by_reason"]),
        (BatchResult, ["steps_ms"]),
        (RunOptions, ["max_batches_in_flight"]),
        (Faults, ["worker_deaths", "driver_deaths", "drops"]),
    ],
)
def test_names_that_are_given_for_storms_exist(owner: object, names: list[str]) -> None:
    for name in names:
        assert re.search(rf"\b{name}\b", PAGE), f"the page does not name {name}"
        assert hasattr(owner, name), f"there is no {name}"
