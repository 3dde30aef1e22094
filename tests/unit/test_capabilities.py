"""From what a source declares follows how its batches are made safe, what is refused, and what a crash leads to."""

from __future__ import annotations

import itertools

import pytest
from support.brokers import LEFT_OUT, left_out

from stormproof.core.base.errors import MachineUnfit
from stormproof.core.base.extras import required
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.capabilities import (
    KAFKA,
    KESTREL,
    NATS,
    RABBITMQ_CLASSIC,
    RABBITMQ_WITHOUT_ID,
    REDIS_STREAM,
    Capabilities,
    Crash,
    DeliverySemantics,
    Protection,
    StableIds,
    matrix,
    outcome_of,
    protection_of,
    refusal,
)

EVERY = [Capabilities(ids, *flags) for ids in StableIds for flags in itertools.product([False, True], repeat=4)]


@pytest.mark.parametrize(
    ("able", "protection"),
    [
        (KAFKA, Protection.RANGES),
        (RABBITMQ_CLASSIC, Protection.JOURNAL),
        (REDIS_STREAM, Protection.JOURNAL),
        (NATS, Protection.JOURNAL),
        (KESTREL, Protection.TAKE_OVER),
        (RABBITMQ_WITHOUT_ID, Protection.NONE),
    ],
)
def test_how_a_batch_is_made_safe_follows_from_what_the_server_can_do(
    able: Capabilities, protection: Protection
) -> None:
    assert protection_of(able) is protection


def test_exactly_once_without_ids_is_refused_by_name_and_at_least_once_is_not() -> None:
    assert "queue q have no stable id" in str(refusal(RABBITMQ_WITHOUT_ID, Guarantee.EXACTLY_ONCE, "queue q"))
    assert refusal(RABBITMQ_WITHOUT_ID, Guarantee.AT_LEAST_ONCE, "queue q") is None
    assert refusal(RABBITMQ_WITHOUT_ID, Guarantee.AT_MOST_ONCE, "queue q") is None


def test_what_is_served_as_exactly_once_applies_every_message_once_unless_it_takes_over() -> None:
    for able in EVERY:
        if refusal(able, Guarantee.EXACTLY_ONCE, "s") is None and protection_of(able) is not Protection.TAKE_OVER:
            outcomes = {outcome_of(able, Guarantee.EXACTLY_ONCE, crash) for crash in Crash}
            assert outcomes <= {DeliverySemantics.ONCE, DeliverySemantics.ABSENT}, able


def test_no_crash_loses_a_message_but_under_at_most_once() -> None:
    for able, guarantee in itertools.product(EVERY, (Guarantee.AT_LEAST_ONCE, Guarantee.EXACTLY_ONCE)):
        assert DeliverySemantics.LOST not in {outcome_of(able, guarantee, crash) for crash in Crash}, able


def test_at_most_once_doubles_nothing_but_what_its_server_was_told_and_forgot() -> None:
    for able in EVERY:
        doubled = {
            crash for crash in Crash if outcome_of(able, Guarantee.AT_MOST_ONCE, crash) is DeliverySemantics.TWICE
        }
        assert doubled <= {Crash.SERVER}, able


def test_a_take_over_doubles_only_what_was_not_told_to_the_server() -> None:
    doubled = {
        crash for crash in Crash if outcome_of(KESTREL, Guarantee.EXACTLY_ONCE, crash) is DeliverySemantics.TWICE
    }
    assert doubled == {Crash.WRITTEN, Crash.SERVER}


def test_the_matrix_has_each_source_under_each_guarantee() -> None:
    rows = list(matrix())
    assert len({(row.name, guarantee) for row, guarantee, _, _ in rows}) == len(rows)
    assert {row.made_by for row, *_ in matrix(frozenset({"NatsSource"}))} == {"NatsSource"}


def test_a_missing_package_is_named_with_the_command_that_installs_it() -> None:
    with pytest.raises(MachineUnfit, match=r"source s needs .* no_such_package, .*pip install 'stormproof\[redis\]'"):
        required("no_such_package.inner", "redis", "source s")


def test_a_package_that_lacks_something_itself_is_not_taken_for_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: else the wrong package would be installed."""

    def fails(name: str) -> None:
        raise ModuleNotFoundError(f"No module named {name!r}", name="its_own_need")

    monkeypatch.setattr("importlib.import_module", fails)
    with pytest.raises(ModuleNotFoundError, match="redis"):
        required("redis", "redis", "source s")


def test_servers_that_were_left_out_are_named_once() -> None:
    skipped = f"Skipped: {LEFT_OUT}NATS: x is not installed; install it with: y"
    assert left_out([skipped, skipped, "Skipped: needs Spark"]) == [skipped.removeprefix("Skipped: ")]
