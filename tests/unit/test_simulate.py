"""Simulations: a topology in virtual time, where a seed and the faults decide what goes wrong, and what is told of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partialmethod
from typing import Any

import pytest

from stormproof import MemoryMap, MemorySource, Topology, count
from stormproof.core.base.message import FailureReason
from stormproof.core.bolt import Bolt, Tuple
from stormproof.core.task import job
from stormproof.errors import UsageError
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.prepare.rejected_messages import Rejects
from stormproof.sinks.prepare.staging import Misfits
from stormproof.sinks.stores.memory import MemorySink
from stormproof.testing import End, Fault, FaultKind, Faults, Simulation, simulate
from stormproof.trident.driver.batch_records import Finished, PreparedBatch
from stormproof.trident.driver.steps import Steps

LINES = ["a b", "b", "c a c"]
GUARANTEES = ["at-most-once", "at-least-once", "exactly-once"]
TRACKED = ["at-least-once", "exactly-once"]
MANY = Faults(
    raises=0.03,
    fails=0.02,
    misreads=0.03,
    drops=0.02,
    duplicates=0.02,
    delays=0.1,
    worker_deaths=0.05,
    driver_deaths=0.05,
)


def words() -> Topology:
    t = Topology("words")
    lines = t.spout("lines", MemorySource("lines", [b"not read"]))
    made = t.bolt("split", lambda line: line.split(), lines.shuffle(), schema="word string")
    upper = t.bolt("upper", lambda word: [word.upper()], made.fields("word"), schema="word string")
    t.sink(MemorySink("ups"), upper)
    return t


def held(run: Simulation, sink: str = "ups") -> Counter[object]:
    return Counter(next(iter(row.values())) for row in run.rows(sink))


def expected(lines: Sequence[str] = LINES) -> Counter[object]:
    return Counter(word.upper() for line in lines for word in line.split())


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_without_faults_everything_is_acked_once(guarantee: str) -> None:
    run = simulate(words(), LINES, guarantee=guarantee, batch_messages=2)
    assert held(run) == expected()
    assert [m.end for m in run.messages] == [End.ACKED] * 3
    assert run.idle
    assert (run.statistics.drivers, run.statistics.batches, run.statistics.replayed) == (1, 2, 0)
    assert Counter(row["word"] for row in run.emitted["split"]["default"]) == Counter(" ".join(LINES).split())
    assert [payload.payload for payload in run.messages] == [line.encode() for line in LINES]


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_the_same_seed_replays_identically(guarantee: str) -> None:
    runs = [simulate(words(), LINES * 3, seed=5, guarantee=guarantee, faults=MANY, batch_messages=4) for _ in range(2)]
    assert runs[0] == runs[1]
    assert runs[0].statistics.struck != {}


def test_another_seed_does_not() -> None:
    runs = [simulate(words(), LINES * 3, seed=s, guarantee="at-least-once", faults=MANY) for s in range(6)]
    assert len({run.log() for run in runs}) > 3


@pytest.mark.parametrize("guarantee", TRACKED)
def test_a_tuple_that_raises_once_is_replayed(guarantee: str) -> None:
    faults = Faults(at=(Fault(FaultKind.RAISE, "upper", 2),))
    run = simulate(words(), LINES, guarantee=guarantee, faults=faults)
    assert len(run.acked) == 3
    assert len(run.failed) == len(run.replayed) == 1
    (failure,) = run.failed[0].failures
    assert (failure.reason, failure.component, failure.counted) == (FailureReason.ERROR, "upper", True)
    assert run.statistics.failed_by_reason == {"error": 1}
    assert held(run) >= expected()
    assert run.statistics.virtual_s > 0


def test_a_tuple_that_always_fails_makes_a_dead_letter() -> None:
    run = simulate(words(), LINES, guarantee="exactly-once", faults=Faults(fails={"upper": 1.0}), max_attempts=2)
    assert [m.end for m in run.messages] == [End.DEAD] * 3
    assert [letter.times_failed for letter in run.dead_letters] == [2] * 3
    assert run.rows("ups") == ()
    assert run.statistics.failed_by_reason == {"failed": 6}


def test_a_crash_after_the_sink_doubles_rows_at_least_once_and_not_exactly_once() -> None:
    faults = Faults(at=(Fault(FaultKind.DRIVER_DEATH, "commit.after_sink"),))
    again = simulate(words(), LINES, guarantee="at-least-once", faults=faults)
    assert held(again) == expected() + expected()
    assert [w.batch == again.written["ups"][0].batch for w in again.written["ups"]] == [True, False]
    once = simulate(words(), LINES, guarantee="exactly-once", faults=faults)
    assert held(once) == expected()
    assert again.statistics.drivers == once.statistics.drivers == 2


def test_a_crash_in_the_job_loses_the_batch_at_most_once() -> None:
    faults = Faults(at=(Fault(FaultKind.DRIVER_DEATH, "run.after"),))
    run = simulate(words(), LINES, guarantee="at-most-once", faults=faults, batch_messages=2)
    assert held(run) == expected(LINES[2:])
    assert len(run.acked) == 3


@pytest.mark.parametrize("guarantee", TRACKED)
def test_a_lost_chunk_is_seen(guarantee: str) -> None:
    faults = Faults(at=(Fault(FaultKind.DROP, "stage 1"),))
    run = simulate(words(), LINES, guarantee=guarantee, faults=faults)
    assert held(run) == expected()
    assert (run.statistics.jobs, run.statistics.struck) == (2, {"drops": 1})


def test_a_message_that_hangs_its_task_times_out_alone() -> None:
    run = simulate(words(), LINES, guarantee="at-least-once", faults=Faults(timeouts={"stage 0": 1.0}), max_attempts=1)
    assert {m.end for m in run.messages} == {End.DEAD}
    assert run.statistics.failed_by_reason == {"timeout": 3}


def test_a_delay_lets_the_lease_run_out_and_the_batch_comes_again() -> None:
    run = simulate(words(), LINES, guarantee="at-least-once", seed=1, faults=Faults(delays=0.4, delay_s=60.0))
    assert held(run) == expected()
    assert run.statistics.replayed > 0
    assert run.statistics.drivers == 1


def test_what_two_runs_of_a_task_that_is_not_deterministic_sent_is_not_taken_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    faults = Faults(misreads=0.5, worker_deaths={"stage 0": 0.5})
    lines = [f"w{n} v{n}" for n in range(6)]

    def doubled() -> bool:
        runs = [simulate(words(), lines, seed=s, guarantee="at-most-once", faults=faults) for s in range(85, 95)]
        return any(held(run) - expected(lines) for run in runs)

    assert not doubled()
    monkeypatch.setattr(job, "require_one_run", lambda _: None)  # control: the runs' marks are not compared
    assert doubled()


def test_what_is_left_at_the_end_is_pending() -> None:
    run = simulate(words(), LINES, guarantee="at-least-once", batch_messages=1, max_steps=2)
    assert not run.idle
    assert [m.end for m in run.messages] == [End.ACKED, End.ACKED, End.PENDING]
    assert run.backlogs["lines"].ready == 1


def test_a_driver_that_gives_up_is_followed_by_another() -> None:
    run = simulate(words(), LINES, guarantee="at-least-once", faults=Faults(drops={"stage 1": 1.0}), max_steps=20)
    assert {m.end for m in run.messages} == {End.PENDING}
    assert "gave_up" in {event.what for event in run.events}
    assert run.rows("ups") == ()


class Together(Bolt):
    def __init__(self) -> None:
        self.tuples: list[Tuple] = []

    def execute(self, tuple: Tuple, /) -> None:
        self.tuples.append(tuple)

    def finish(self) -> None:
        if self.tuples:
            self.collector.emit(" ".join(sorted(t["word"] for t in self.tuples)), anchors=self.tuples)
        for tuple in self.tuples:
            self.collector.ack(tuple)


def joined() -> Topology:
    t = Topology("joined")
    left, right = (t.spout(name, MemorySource(name, schema="word string")) for name in ("left", "right"))
    both = t.bolt("join", Together(), left.global_(), right.global_(), schema="words string")
    t.sink(MemorySink("ups"), t.bolt("check", lambda w: [w], both.shuffle(), schema="words string"))
    return t


@pytest.mark.parametrize("guarantee", TRACKED)
def test_several_spouts_and_tuples_with_several_anchors(guarantee: str) -> None:
    run = simulate(joined(), {"left": ["a"], "right": ["b", "c"]}, guarantee=guarantee)
    assert held(run) == Counter(["a b c"])
    faults = Faults(at=(Fault(FaultKind.FAIL, "check"),))
    run = simulate(joined(), {"left": ["a"], "right": ["b", "c"]}, guarantee=guarantee, faults=faults)
    assert {(m.spout, m.number, m.end) for m in run.replayed} == {
        ("left", 0, End.ACKED), ("right", 0, End.ACKED), ("right", 1, End.ACKED)
    }  # fmt: skip


def test_sinks_are_not_touched_and_folds_are_served() -> None:
    t = Topology("counts")
    made = t.stream("lines", MemorySource("lines")).flat_map(str.split, "line", schema="word string")
    made.group_by("word").persistent_aggregate(n=count()).into(DeltaSink("/nowhere/counts"))
    run = simulate(t, [b"a b", b"a"], batch_messages=1)
    assert run.rows("delta.counts") == ({"word": "a", "n": 2}, {"word": "b", "n": 1})
    assert [w.batch for w in run.written["delta.counts"]] == [1, 2]


def test_objects_become_json() -> None:
    t = Topology("orders")
    t.stream("orders", MemorySource("orders", schema="id long, name string")).into(MemorySink("out"))
    run = simulate(t, [{"id": 1, "name": "x"}, "{}", b"["], max_attempts=1)
    assert run.rows("out") == ({"id": 1, "name": "x"}, {"id": None, "name": None})
    assert run.statistics.failed_by_reason == {"bad_message": 1}


def test_what_cannot_be_simulated_is_refused() -> None:
    with pytest.raises(UsageError, match="no spout 'x'"):
        simulate(words(), {"x": []})
    with pytest.raises(UsageError, match="several spouts"):
        simulate(joined(), ["a"])
    with pytest.raises(UsageError, match="probability"):
        simulate(words(), LINES, faults=Faults(drops=2.0))
    asking = Topology("asking")
    lines = asking.stream("lines", MemorySource("lines", schema="line string"))
    lines.group_by("line").persistent_aggregate(n=count(), state=MemoryMap(), state_name="seen")
    lines.state_query("seen", "line", schema="n long").into(MemorySink("out"))
    with pytest.raises(UsageError, match="'asking' reads a state"):
        simulate(asking, ["a"])
    with pytest.raises(UsageError, match="no sink 'x'"):
        simulate(words(), LINES).rows("x")


def test_an_error_names_the_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    from stormproof.core.engine.inline import InlineEngine

    def broken(*_: object) -> object:
        raise ZeroDivisionError

    monkeypatch.setattr(InlineEngine, "run", broken)
    with pytest.raises(ZeroDivisionError) as caught:
        simulate(words(), LINES, seed=77)
    assert any("seed=77" in note for note in caught.value.__notes__)
    assert "seed=3" in repr(simulate(words(), [], seed=3))


# -- rows that a table refuses -----------------------------------------------------------------------------------------


def into_two(lineage: bool = False, contract: str = "freeze") -> Topology:
    t = Topology("two")
    lines = t.stream("lines", MemorySource("lines"))
    made = lines.flat_map(lambda line: [(w, line) for w in line.split()], "line", schema="word string, line string")
    made.into(MemorySink("strict", lineage=lineage, schema_contract=contract), MemorySink("plain"))
    return t


def in_lines(run: Simulation, sink: str) -> Counter[object]:
    return Counter(row["line"] for row in run.rows(sink))


def whole(lines: Sequence[str]) -> Counter[object]:
    return Counter(line for line in lines for _ in line.split())


def test_a_refused_row_rejects_its_message_at_that_sink() -> None:
    lines = [f"{n} x{n} y{n}" for n in range(6)]
    run = simulate(into_two(), lines, faults=Faults(at=(Fault(FaultKind.REFUSE, "strict", 5),)), batch_messages=3)
    (rejected,) = run.rejected
    kept = [line for number, line in enumerate(lines) if number != rejected.number]
    assert (rejected.spout, rejected.sink) == ("lines", "strict")
    assert (in_lines(run, "strict"), in_lines(run, "plain")) == (whole(kept), whole(lines))
    assert Counter(m.end for m in run.messages) == {End.ACKED: 5, End.REJECTED: 1}
    assert (run.statistics.rejected, run.statistics.struck) == (1, {"refuses": 1})


@pytest.mark.parametrize("seed", range(12))
def test_a_message_is_rejected_whole_whoever_dies(seed: int) -> None:
    """Under all other faults, too; and each seed gives the same run again."""
    lines = [f"{n} x{n} y{n}" for n in range(12)]
    faults = replace(MANY, refuses={"strict": 0.1})
    run = simulate(into_two(), lines, seed=seed, faults=faults, max_attempts=100, batch_messages=4)
    refused = {one.number for one in run.rejected}
    assert in_lines(run, "strict") == whole([line for n, line in enumerate(lines) if n not in refused])
    assert in_lines(run, "plain") == whole(lines)
    assert {m.number for m in run.ended(End.REJECTED)} == refused
    assert simulate(into_two(), lines, seed=seed, faults=faults, max_attempts=100, batch_messages=4) == run


FINISHING = ["finish.before", "finish.in_transaction", "finish.before_commit", "finish.after"]
FINISHING_OWED = [*FINISHING[:-1], "finish.before_confirm", FINISHING[-1]]


def is_nowhere(guarantee: str, place: str) -> list[str]:
    """The lines that are neither in the sink nor rejected, where a driver dies at this place with a refused row in hand."""
    lines = [f"{n} x{n} y{n}" for n in range(6)]
    refused = Fault(FaultKind.REFUSE, "strict", 5)
    faults = Faults(at=(refused, Fault(FaultKind.DRIVER_DEATH, place)))
    run = simulate(into_two(), lines, guarantee=guarantee, faults=faults, batch_messages=3)
    assert run.statistics.struck == {"refuses": 1, "driver_deaths": 1}
    assert run.idle
    rejected = {lines[one.number] for one in run.rejected}
    return [line for line in lines if in_lines(run, "strict")[line] < 3 and line not in rejected]


@pytest.mark.parametrize(
    ("guarantee", "place"),
    [*(("at-least-once", place) for place in FINISHING_OWED), *(("exactly-once", place) for place in FINISHING)],
)
def test_a_rejected_message_is_on_record_wherever_its_driver_dies(guarantee: str, place: str) -> None:
    """A simulated source is not in the ledger's database, so its confirm is a write of its own."""
    assert not is_nowhere(guarantee, place)


def test_control_a_confirm_before_the_record_loses_a_rejected_message(monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Steps.finish

    def confirmed_first(steps: Steps, batch: PreparedBatch, *rest: Any) -> Finished:
        steps.source.confirm(steps.lease(batch.txid))
        return finish(steps, batch, *rest)

    monkeypatch.setattr(Steps, "finish", confirmed_first)
    assert is_nowhere("at-least-once", "finish.before_commit")


def test_control_a_rejected_row_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that leaves out the refused row, and not the others of its message."""
    lines = [f"{n} x{n} y{n}" for n in range(6)]
    monkeypatch.setattr("stormproof.sinks.prepare.rejected_messages.Rejects.close", lambda _: False)
    run = simulate(into_two(), lines, faults=Faults(at=(Fault(FaultKind.REFUSE, "strict", 5),)), batch_messages=3)
    (rejected,) = run.rejected
    assert in_lines(run, "strict") != whole([line for n, line in enumerate(lines) if n != rejected.number])


def test_the_last_row_of_a_key_that_is_refused_gives_way_to_the_one_before() -> None:
    t = Topology("newest")
    rows = t.stream("lines", MemorySource("lines")).map(lambda n: ("k", int(n)), "line", schema="k string, n int")
    rows.into(MemorySink("newest", mode="upsert", key="k", order_by="n"))
    run = simulate(t, ["1", "2", "3"], faults=Faults(at=(Fault(FaultKind.REFUSE, "newest"),)))
    assert run.rows("newest") == ({"k": "k", "n": 2},)
    assert [one.number for one in run.rejected] == [2]


def counting(*, per_batch: bool = False, contract: str = "freeze") -> Topology:
    t = Topology("counts")
    words = t.stream("lines", MemorySource("lines")).flat_map(str.split, "line", schema="word string")
    words.into(MemorySink("words"))
    groups = words.group_by("word")
    folded = groups.agg(n=count()) if per_batch else groups.persistent_aggregate(n=count())
    folded.into(MemorySink("counts", schema_contract=contract))
    return t


def counted(run: Simulation) -> Counter[object]:
    found: Counter[object] = Counter()
    for row in run.rows("counts"):
        n = row["n"]
        assert isinstance(n, int)
        found[row["word"]] += n
    return found


def not_rejected(run: Simulation, lines: Sequence[str], sink: str = "counts") -> Counter[object]:
    """The words of the messages that the sink has, by what is said of each message."""
    gone = {one.number for one in run.rejected if one.sink == sink}
    return Counter(word for number, line in enumerate(lines) if number not in gone for word in line.split())


@pytest.mark.parametrize("per_batch", [False, True])
@pytest.mark.parametrize("kind", [FaultKind.REFUSE, FaultKind.REJECT])
def test_a_refused_group_takes_its_own_messages_and_no_other(kind: FaultKind, per_batch: bool) -> None:
    """Whether the table refuses its row, or a column cannot hold it."""
    topology = counting(per_batch=per_batch, contract="discard_row")
    lines = ["a b", "b", "c d", "d", "e"]
    run = simulate(topology, lines, faults=Faults(at=(Fault(kind, "counts", 2),)))
    (struck,) = [event for event in run.events if event.what == kind.value]
    (word,) = [word for word in "abcde" if f"'{word}'" in struck.detail]
    with_it = [number for number, line in enumerate(lines) if word in line.split()]
    assert [(one.number, one.sink) for one in run.rejected] == [(number, "counts") for number in with_it]
    assert counted(run) == not_rejected(run, lines)
    assert held(run, "words") == Counter(" ".join(lines).split())
    assert {m.number for m in run.ended(End.REJECTED)} == set(with_it)


@pytest.mark.parametrize("guarantee", GUARANTEES)
def test_under_at_most_once_groups_are_never_refused(guarantee: str) -> None:
    run = simulate(counting(), ["a", "b", "a"], guarantee=guarantee, faults=Faults(refuses={"counts": 1.0}))
    assert bool(run.rejected) is (guarantee != "at-most-once")
    assert counted(run) == not_rejected(run, ["a", "b", "a"])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("contract", ["freeze", "discard_row"])
def test_groups_are_refused_whole_whoever_dies(seed: int, contract: str) -> None:
    """Under all other faults, too; and each seed gives the same run again."""
    lines = [f"{number} x{number % 3} y{number % 5}" for number in range(12)]
    strict = {"counts": 0.1}
    faults = replace(MANY, refuses=strict, rejects=strict if contract == "discard_row" else 0.0)
    topology = counting(per_batch=bool(seed % 2), contract=contract)
    run = simulate(topology, lines, seed=seed, faults=faults, max_attempts=100, batch_messages=4)
    assert run.idle
    assert counted(run) == not_rejected(run, lines)
    assert held(run, "words") == Counter(" ".join(lines).split())
    assert simulate(topology, lines, seed=seed, faults=faults, max_attempts=100, batch_messages=4) == run


@pytest.mark.parametrize("seed", range(6))
def test_misfits_reject_their_messages_under_discard_row(seed: int) -> None:
    t = into_two(contract="discard_row")
    lines = [f"{n} x{n} y{n}" for n in range(12)]
    faults = replace(MANY, rejects={"strict": 0.1}, refuses={"strict": 0.05})
    run = simulate(t, lines, seed=seed, faults=faults, max_attempts=100, batch_messages=4)
    assert FailureReason.SINK_ERROR.value not in run.statistics.failed_by_reason
    refused = {one.number for one in run.rejected}
    assert in_lines(run, "strict") == whole([line for n, line in enumerate(lines) if n not in refused])
    assert in_lines(run, "plain") == whole(lines)


def test_control_a_group_left_out_without_its_messages_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that leaves out the group's row, and does not say whose it is."""
    whole: Any = Rejects.__init__
    monkeypatch.setattr(Rejects, "__init__", partialmethod(whole, row_by_row=True))
    lines = ["a b", "b", "c d", "d", "e"]
    run = simulate(counting(), lines, faults=Faults(at=(Fault(FaultKind.REFUSE, "counts", 2),)))
    assert counted(run) != not_rejected(run, lines)


def test_control_a_misfit_left_out_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{n} x{n} y{n}" for n in range(6)]
    monkeypatch.setattr(Misfits, "of", lambda _: Misfits())
    faults = Faults(at=(Fault(FaultKind.REJECT, "strict", 5),))
    run = simulate(into_two(contract="discard_row"), lines, faults=faults, batch_messages=3)
    refused = {one.number for one in run.rejected}
    assert in_lines(run, "strict") != whole([line for n, line in enumerate(lines) if n not in refused])


def test_lineage_names_the_simulated_messages() -> None:
    lines = ["a b", "c", "d a"]
    run = simulate(into_two(lineage=True), lines, seed=3, faults=MANY, max_attempts=100, batch_messages=2)
    assert {(row["line"], row["_message_id"]) for row in run.rows("strict")} == {("a b", "0"), ("c", "1"), ("d a", "2")}
