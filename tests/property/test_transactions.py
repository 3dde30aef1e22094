"""Crash schedules against the exactly-once statement: the sinks equal the fold of the committed transactions.

The model is the input alone: which messages were put, and which of them can never succeed.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.memory_run import World

from stormproof.core.base.errors import FatalError, TransientError
from stormproof.core.base.failpoint import FAILPOINTS, FailpointError, armed
from stormproof.core.base.message import Guarantee
from stormproof.sinks.contract.protocol import CommitDecision
from stormproof.sinks.stores import memory as memory_sink
from stormproof.trident.driver import recovery
from stormproof.trident.driver.batch_records import Finished, PreparedBatch, SinkAnswers
from stormproof.trident.driver.steps import Steps
from stormproof.trident.ledger import tables as t
from stormproof.trident.ledger import txns
from stormproof.trident.ledger.tables import Txn
from stormproof.trident.terms.transaction_states import MOVES, TxnCause, TxnState

APART = ("delta", "postgres", "queue", "journal", "operator", "audit", "reject", "group", "upkeep")
REACHABLE = sorted(p.name for p in FAILPOINTS.values() if p.scope not in APART)


class Flaky:
    """Raises for poison always, and for ``flaky N`` the first N times."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def __call__(self, line: str) -> list[str]:
        kind, _, rest = line.partition(" ")
        if kind == "poison":
            raise ValueError(line)
        if kind == "flaky":
            self.calls[line] += 1
            if self.calls[line] == 1:
                raise RuntimeError(line)
        return rest.split()


class CrashMachine(RuleBasedStateMachine):
    """One topology under one guarantee, whose drivers die at failpoints that Hypothesis chooses."""

    guarantee = Guarantee.EXACTLY_ONCE

    @initialize(
        fold=st.booleans(), sinks=st.integers(1, 2), seed=st.integers(0, 2**32), in_flight=st.sampled_from([1, 3])
    )
    def begin(self, fold: bool, sinks: int, seed: int, in_flight: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.world = World(
            [], Path(self._folder.name), split=Flaky(), fold=fold, sinks=sinks, seed=seed, in_flight=in_flight
        )
        self.put: list[str] = []

    @rule(kinds=st.lists(st.sampled_from(["plain", "plain", "plain", "flaky", "poison"]), min_size=1, max_size=9))
    def produce(self, kinds: list[str]) -> None:
        lines = [f"{kind} m{len(self.put) + i} common" for i, kind in enumerate(kinds)]
        self.put += lines
        self.world.source.put([line.encode() for line in lines])

    @rule(point=st.sampled_from(REACHABLE), action=st.sampled_from(["error", "raise"]), at=st.integers(1, 4))
    def run_and_perhaps_die(self, point: str, action: str, at: int) -> None:
        with contextlib.suppress(FailpointError, TransientError), armed(f"{point}={action}@{at}"):
            self.world.run(self.guarantee, max_batches=4, outage_s=1.0)

    @rule(point=st.sampled_from(["prepare.after", "commit.after_sink", "finish.before"]))
    def die_where_sinks_and_ledger_differ(self, point: str) -> None:
        """As above, where it matters most: among all places it would come up too seldom."""
        self.run_and_perhaps_die(point, "error", 1)

    @precondition(lambda self: self.put)
    @rule()
    def run_to_the_end(self) -> None:
        self.world.run(self.guarantee)
        for sink in range(len(self.world.sinks)):
            self.check_end(self.world.counts(sink))

    def check_end(self, found: Counter[str]) -> None:
        assert found == self.succeeding()

    def succeeding(self) -> Counter[str]:
        return Counter(w for line in self.put if not line.startswith("poison") for w in line.split()[1:])

    @invariant()
    def no_sink_has_a_word_too_many(self) -> None:
        if not hasattr(self, "world"):
            return
        for sink in range(len(self.world.sinks)):
            assert not self.world.counts(sink) - self.succeeding()

    @invariant()
    def one_batch_at_most_is_prepared_and_so_many_are_open_as_may_be_in_flight(self) -> None:
        if not hasattr(self, "world"):
            return
        with self.world.ledger_engine.execution_options(schema_translate_map={t.SCHEMA: None}).connect() as connection:
            states = connection.execute(sa.select(t.txn.c.state)).scalars().all()
        assert states.count(TxnState.PREPARED.value) <= 1
        assert sum(not TxnState(state).ended for state in states) <= self.world.in_flight

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        try:
            if self.put:
                self.run_to_the_end()
        finally:
            self._folder.cleanup()
            self.world.ledger_engine.dispose()


def schedule(examples: int, *, shrink: bool = True) -> settings:
    phases = [Phase.explicit, Phase.reuse, Phase.generate, *([Phase.shrink] if shrink else [])]
    return settings(
        max_examples=examples,
        stateful_step_count=12,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
        phases=phases,
        database=None,
        print_blob=True,
    )


TestExactlyOnce = CrashMachine.TestCase
TestExactlyOnce.settings = schedule(30)


class AtLeastOnceMachine(CrashMachine):
    guarantee = Guarantee.AT_LEAST_ONCE

    def check_end(self, found: Counter[str]) -> None:
        assert not self.succeeding() - found, "at-least-once lost a message"

    @invariant()
    def no_sink_has_a_word_too_many(self) -> None:
        """Not promised."""


TestAtLeastOnce = AtLeastOnceMachine.TestCase
TestAtLeastOnce.settings = schedule(20)


class AtMostOnceMachine(CrashMachine):
    guarantee = Guarantee.AT_MOST_ONCE

    def check_end(self, found: Counter[str]) -> None:
        assert not found - self.succeeding(), "at-most-once doubled a message"


TestAtMostOnce = AtMostOnceMachine.TestCase
TestAtMostOnce.settings = schedule(20)


# -- negative controls: the machine must catch each of these -----------------------------------------------------------


def every_commit_applies(patch: pytest.MonkeyPatch) -> None:
    """A sink without a transaction identifier."""
    patch.setattr(memory_sink, "decide", lambda *_: CommitDecision.COMMIT)


def confirm_before_commit(patch: pytest.MonkeyPatch) -> None:
    """`committed` is recorded, and the messages confirmed, before the sinks hold them."""
    commit_sinks, finish, ended = Steps.commit_sinks, Steps.finish, dict[int, Finished]()

    def early(steps: Steps, batch: PreparedBatch) -> SinkAnswers:
        ended[batch.txid] = finish(steps, replace(batch, work={}), {})
        return commit_sinks(steps, batch)

    patch.setattr(Steps, "commit_sinks", early)
    patch.setattr(Steps, "finish", lambda _, batch, *rest: ended[batch.txid])


def abort_what_is_prepared(patch: pytest.MonkeyPatch) -> None:
    """Recovery gives prepared messages back instead of rolling them forward."""

    def give_back(steps: Steps, txn: Txn, *_: object) -> None:
        steps.source.abort(steps.lease(txn.txid))
        with steps.ledger.transaction(steps.run) as tx:
            patch.setitem(MOVES, TxnState.PREPARED, MOVES[TxnState.PREPARED] | {TxnState.ABORTED})
            cause = TxnCause.DRIVER_ENDED
            txns.move(tx, txn.txid, TxnState.PREPARED, TxnState.ABORTED, cause=cause, reason="given back")

    patch.setattr(recovery, "_roll_forward", give_back)
    patch.setattr(recovery, "_compare", lambda *_: None)
    patch.setattr(memory_sink, "decide", lambda *_: CommitDecision.COMMIT)


def nothing(_: pytest.MonkeyPatch) -> None:
    """The code as it is, under a guarantee that promises less."""


@pytest.mark.parametrize(
    ("guarantee", "sabotage"),
    [
        (Guarantee.AT_LEAST_ONCE, nothing),
        (Guarantee.AT_MOST_ONCE, nothing),
        (Guarantee.EXACTLY_ONCE, every_commit_applies),
        (Guarantee.EXACTLY_ONCE, confirm_before_commit),
        (Guarantee.EXACTLY_ONCE, abort_what_is_prepared),
    ],
)
def test_the_machine_catches(
    guarantee: Guarantee, sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Broken(CrashMachine):
        pass

    Broken.guarantee = guarantee
    sabotage(monkeypatch)
    with pytest.raises((AssertionError, FatalError)):
        run_state_machine_as_test(Broken, settings=schedule(200, shrink=False))
