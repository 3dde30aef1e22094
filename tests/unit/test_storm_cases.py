"""Storm's own cases for acking, by their names, over whole topologies on the inline engine.

Storm feeds one tuple after another and asks after each which messages were acked. Here a batch is the unit: the batch of
the first n feeds must leave incomplete just the messages that Storm has not acked after n feeds. A bolt that keeps a tuple
to the batch's end without ack or fail leaves its message incomplete as `unacked`; nobody waits for a timeout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import ClassVar, cast

import numpy as np
import pyarrow as pa
import pytest
from support.heartbeats import published
from support.jobs import Batch, run_all
from support.memory_run import World

from stormproof import MemorySink, MemorySource, Topology
from stormproof.core.base.arrow import Rows, Words
from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import TopologyError
from stormproof.core.base.message import Guarantee
from stormproof.core.bolt import BasicBolt, Bolt, Emit, FailTuple, Streams, Tuple
from stormproof.core.engine.inline import InlineEngine, Tamper
from stormproof.core.graph.components import Subscription
from stormproof.core.graph.plan import compile_topology
from stormproof.core.graph.topology import TopologyGraph
from stormproof.core.heartbeat.listener import HeartbeatListener, JobSigns
from stormproof.core.heartbeat.task import AttemptKey, Heartbeat, ReportAddress, running
from stormproof.core.task import account, task
from stormproof.core.task.job import ACK, ACK_SCHEMA, INIT, INIT_SCHEMA, Job, WireRow
from stormproof.core.tracking import share as tracking
from stormproof.core.tracking.acker import acker_of
from stormproof.core.tracking.verdict import JobReport
from stormproof.trident.driver.jobs import Watch
from stormproof.trident.driver.leases import LeaseKeeper

TIMEOUT_S = 10.0

modes = pytest.mark.parametrize("per_message", [False, True], ids=["batch", "per-message"])


# --- bolts of Storm's tests ----------------------------------------------------------------------------------------


class Branching(BasicBolt):
    """Storm's BranchingBolt: each tuple so many times. One branch is its IdentityBolt."""

    streams = "at int"

    def __init__(self, branches: int) -> None:
        self.branches = branches

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        for _ in range(self.branches):
            emit(tuple.values[0])


class Aggregating(Bolt):
    """Storm's AggBolt: one tuple for so many, anchored to all of them. It takes them in the order in which they were fed,
    and forgets what is left.
    """

    streams = "at int"

    def __init__(self, every: int) -> None:
        self.every = every
        self.held: list[Tuple] = []

    def execute(self, tuple: Tuple, /) -> None:
        self.held.append(tuple)

    def finish(self) -> None:
        fed = sorted(self.held, key=lambda t: t["at"])
        for start in range(0, len(fed) - self.every + 1, self.every):
            some = fed[start : start + self.every]
            self.collector.emit(some[0]["at"], anchors=some)
            for one in some:
                self.collector.ack(one)


class AggregatingUnanchored(Aggregating):
    """One that acks at once, and anchors nothing: its messages are complete too early."""

    def execute(self, tuple: Tuple, /) -> None:
        super().execute(tuple)
        self.collector.ack(tuple)

    def finish(self) -> None:
        self.collector.emit(0)


class DupAnchor(Bolt):
    """Storm's DupAnchorBolt: names its input twice as anchor."""

    streams = "at int"

    def execute(self, tuple: Tuple, /) -> None:
        self.collector.emit(tuple["at"], anchors=[tuple, tuple])
        self.collector.ack(tuple)


class Acks(Bolt):
    """Storm's AckBolt."""

    def execute(self, tuple: Tuple, /) -> None:
        self.collector.ack(tuple)


class AcksEveryOther(Bolt):
    """Storm's AckEveryOtherBolt: acks the first, the third, and so on."""

    def __init__(self) -> None:
        self.acks = False

    def execute(self, tuple: Tuple, /) -> None:
        self.acks = not self.acks
        if self.acks:
            self.collector.ack(tuple)


class Fails(Bolt):
    def execute(self, tuple: Tuple, /) -> None:
        self.collector.fail(tuple, "no")


# --- feeding -------------------------------------------------------------------------------------------------------


def feeder(name: str, feeds: Sequence[str]) -> MemorySource:
    """The messages that are fed to this spout: each is the number of its feed."""
    return MemorySource(name, [b'{"at": %d}' % n for n, to in enumerate(feeds) if to == name], schema="at int")


def engine(rng: Random | None = None, tamper: Tamper | None = None) -> InlineEngine:
    return InlineEngine(3, rng=rng, tamper=tamper)


def incomplete(batch: Batch) -> set[str]:
    """The messages that are not complete; everything else must add up."""
    assert batch.mismatches == ()
    return {*batch.failed, *batch.late, *batch.lost}


def acks_after_each(
    build: Callable[[Sequence[str]], TopologyGraph], feeds: Sequence[str], tmp: Path, seed: int, *, per_message: bool
) -> list[Mapping[str, int]]:
    """How many messages of each feeder get their ack after each feed."""
    acked: set[str] = set()
    found: list[Mapping[str, int]] = []
    for number in range(1, len(feeds) + 1):
        fed = feeds[:number]
        places = {name: range(fed.count(name)) for name in fed}
        names = {f"{name}:{place}" for name, its in places.items() for place in its}
        names = {n.split(":")[1] for n in names} if len(build(fed).spouts) == 1 else names
        batch = run_all(engine(Random(seed + number)), build(fed), tmp, per_message=per_message)
        now = names - incomplete(batch)
        assert acked <= now, "what was acked once stays acked"
        found.append(Counter(name.split(":")[0] if ":" in name else fed[0] for name in now - acked))
        acked = now
    return found


# --- testAcking, testAckBranching, testAckingSelfAnchor ------------------------------------------------------------


def acking(aggregating: Aggregating) -> Callable[[Sequence[str]], TopologyGraph]:
    def build(feeds: Sequence[str]) -> TopologyGraph:
        t = Topology("acking")
        branches = [
            t.bolt(f"branching-{name}", Branching(number), t.spout(name, feeder(name, feeds)).shuffle())
            for name, number in (("1", 2), ("2", 4), ("3", 1))
        ]
        seven = t.bolt("7", aggregating, *(branch.global_() for branch in branches))
        t.bolt("9", Acks(), t.bolt("8", Branching(2), seven.shuffle()).shuffle())
        return t

    return build


@modes
def test_acking(per_message: bool, tmp_path: Path, seed: int) -> None:
    """`testAcking`: three spouts, branched into 2, 4 and 1, aggregated by threes."""
    feeds = ["1", "2", "1", "1", "3", "2"]
    acks = acks_after_each(acking(Aggregating(3)), feeds, tmp_path, seed, per_message=per_message)
    assert acks == [{}, {"1": 1, "2": 1}, {}, {"1": 1}, {}, {"1": 1, "2": 1, "3": 1}]


def test_acking_sees_a_bolt_that_does_not_anchor(tmp_path: Path, seed: int) -> None:
    """Negative control: every message is complete as soon as it is fed."""
    acks = acks_after_each(acking(AggregatingUnanchored(3)), ["1", "2", "1"], tmp_path, seed, per_message=False)
    assert acks == [{"1": 1}, {"2": 1}, {"1": 1}]


@modes
def test_ack_branching(per_message: bool, tmp_path: Path, seed: int) -> None:
    """`testAckBranching`: two branches of one spout, aggregated by fours: nothing after the first feed, then both."""

    def build(feeds: Sequence[str]) -> TopologyGraph:
        t = Topology("branching")
        one = t.spout("1", feeder("1", feeds))
        branches = [t.bolt(name, Branching(1), one.shuffle()) for name in ("2", "3")]
        t.bolt("5", Acks(), t.bolt("4", Aggregating(4), *(branch.global_() for branch in branches)).shuffle())
        return t

    assert acks_after_each(build, ["1", "1"], tmp_path, seed, per_message=per_message) == [{}, {"1": 2}]


def self_anchor(last: Bolt) -> Callable[[Sequence[str]], TopologyGraph]:
    def build(feeds: Sequence[str]) -> TopologyGraph:
        t = Topology("self-anchor")
        t.bolt("3", last, t.bolt("2", DupAnchor(), t.spout("1", feeder("1", feeds)).shuffle()).shuffle())
        return t

    return build


@modes
def test_acking_self_anchor(per_message: bool, tmp_path: Path, seed: int) -> None:
    """`testAckingSelfAnchor`: the same tuple twice as anchor is still one ack a message."""
    acks = acks_after_each(self_anchor(Acks()), ["1"] * 4, tmp_path, seed, per_message=per_message)
    assert acks == [{"1": 1}] * 4


@modes
def test_a_self_anchored_tuple_that_fails_is_missed(per_message: bool, tmp_path: Path) -> None:
    batch = run_all(engine(), self_anchor(Fails())(["1"]), tmp_path, per_message=per_message)
    assert incomplete(batch) == {"0"}
    assert batch.report.late_xor != 0, "the two links carry different shares"
    assert batch.late == {"0": {"failed at 3"}}


def test_two_links_with_one_share_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control, the XOR trap: both shares cancel, so nobody would miss the tuple."""
    real = tracking.child_shares

    def alike(shares: Words, ordinal: Rows) -> Words:
        return real(shares, np.zeros_like(ordinal))

    monkeypatch.setattr(tracking, "child_shares", alike)
    with pytest.raises(AssertionError, match="different shares"):
        test_a_self_anchored_tuple_that_fails_is_missed(False, tmp_path)


# --- testTimeout, testResetTimeout ---------------------------------------------------------------------------------


@modes
def test_timeout_of_what_is_never_acked(per_message: bool, tmp_path: Path) -> None:
    """`testTimeout`: 1 and 3 are acked, 2 fails. Storm needs the timeout to see that; here the batch's end does."""
    t = Topology("timeout")
    t.bolt("2", AcksEveryOther(), t.spout("1", feeder("1", ["1"] * 3)).global_())
    batch = run_all(engine(), t, tmp_path, per_message=per_message)
    assert incomplete(batch) == {"1"}
    assert batch.late == {"1": {"unacked at 2"}}


class Hand(InlineEngine):
    """The test's hand on time, which passes while a bolt is busy: the keeper looks once a second, as its thread would."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock()
        super().__init__(1, clock=self.clock)
        self.folder = folder
        self.busy_s: list[float] = []
        """How long the bolt was busy, each time that the keeper gave up."""
        self.noted: tuple[int, ...] = ()
        """The messages that were noted in hand when it gave up last."""
        self.keeper: LeaseKeeper
        self.job: Job
        self.heartbeat: Heartbeat | None = None
        self.heartbeats: HeartbeatListener
        self.heard: JobSigns | None = None

    def __deepcopy__(self, memo: object) -> Hand:
        return self

    def watching(self, watch: Watch) -> Watch:
        """The run's own watch, with this hand in the place of the keeper's thread."""
        assert watch.heartbeats is not None
        self.heartbeats = watch.heartbeats
        return replace(
            watch, heartbeats=cast(HeartbeatListener, self), keeping=self.keeping, in_hand=lambda _: self.noted
        )

    @contextmanager
    def of_job(self, key: AttemptKey) -> Generator[JobSigns]:
        with self.heartbeats.of_job(key) as self.heard:
            yield self.heard

    @contextmanager
    def keeping(self, keeper: LeaseKeeper) -> Generator[None]:
        self.keeper = keeper
        yield

    def run(self, job: Job) -> JobReport:
        self.job = job
        return super().run(job)

    def spend(self, seconds: float) -> bool:
        """Be busy for so long, without a sign of life; False where the job was given up meanwhile."""
        for second in range(int(seconds) + 1):
            if second:
                self.clock.advance(1.0)
            assert self.heartbeat is not None
            published(self.heartbeat)
            if not self.keeper.look():
                self.busy_s.append(float(second))
                assert self.heard is not None
                self.noted = self.heard.suspects()  # a worker would be killed here, and its notes stay as they are
                self.cancel(self.job.key)
                return False
        return True

    @contextmanager
    def running(
        self,
        folder: ReportAddress | None,
        number: int,
        task: int,
        *,
        careful: bool = False,
        steps: Mapping[str, int] | None = None,
    ) -> Generator[Heartbeat | None]:
        """A task's own heartbeat, which the hand writes down instead of waiting for its thread."""
        with running(folder, number, task, careful=careful, steps=steps) as self.heartbeat:
            yield self.heartbeat


class Slow(Bolt):
    """`hangs` never comes back, `resets` takes three timeouts, with a sign of life each half."""

    streams = "word string"

    def __init__(self, hand: Hand, resets: bool = True) -> None:
        self.hand = hand
        self.resets = resets

    def execute(self, tuple: Tuple, /) -> None:
        if tuple["line"] == "hangs":
            self.hand.spend(1_000)
        elif tuple["line"] == "resets":
            for _ in range(6):
                if not self.hand.spend(TIMEOUT_S / 2):
                    break
                if self.resets:
                    self.collector.reset_timeout(tuple)
        self.collector.emit(tuple["line"], anchors=tuple)
        self.collector.ack(tuple)


class Timed(World):
    """Lines through a slow bolt, under a message timeout; one failure makes a dead letter."""

    def __init__(self, hand: Hand, lines: Sequence[bytes], *, resets: bool) -> None:
        super().__init__([], hand.folder, clock=hand.clock)
        self.source = MemorySource("lines", lines, max_attempts=1, backoff_base_s=0.0, clock=hand.clock)
        self.topology = t = Topology("timeout", message_timeout_s=TIMEOUT_S)
        slow = t.bolt("slow", Slow(hand, resets), t.spout("lines", self.source).shuffle())
        t.sink(self.sinks[0], t.bolt("next", lambda word: [word], slow.shuffle(), schema="word string"))


def run_watched(hand: Hand, lines: Sequence[bytes], *, resets: bool = True) -> tuple[list[str], dict[str, str]]:
    """Run the lines to the end under at-least-once; the rows, and the reasons of the dead letters."""
    world = Timed(hand, lines, resets=resets)
    world.run(Guarantee.AT_LEAST_ONCE, engine=hand, watch=hand.watching, heartbeat_root=hand.folder / "heartbeat")
    return sorted(world.counts().elements()), {d.payload.decode(): d.reason for d in world.source.dead_letters()}


@pytest.fixture
def hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hand:
    made = Hand(tmp_path)
    monkeypatch.setattr(task, "running", made.running)
    return made


def test_timeout_of_what_hangs(hand: Hand) -> None:
    """`testTimeout`, where the bolt does not come back: after 9 s nothing has failed, after 10 s message 2 has, alone."""
    rows, dead = run_watched(hand, [b"1", b"hangs", b"3"])
    assert (rows, dead) == (["1", "3"], {"hangs": "timeout"})
    assert hand.busy_s == [TIMEOUT_S] * 4, "twice with the others, twice alone"


def test_reset_timeout(hand: Hand) -> None:
    """`testResetTimeout`: a bolt that resets the clock of 1 has time for it; 2, which it leaves alone, fails.

    The clock is the batch's, not one message's as in Storm: while 1 shows signs of life, nobody beside it times out.
    """
    rows, dead = run_watched(hand, [b"resets", b"hangs"])
    assert (rows, dead) == (["resets"], {"hangs": "timeout"})
    assert set(hand.busy_s) == {TIMEOUT_S}


def test_without_resets_it_times_out(hand: Hand) -> None:
    """Negative control: the same bolt, which takes as long and says nothing."""
    rows, dead = run_watched(hand, [b"resets", b"3"], resets=False)
    assert (rows, dead) == (["3"], {"resets": "timeout"})


# --- what comes in an odd order ------------------------------------------------------------------------------------


def words_topology(
    tmp: Path, *, ackers: int | None = None, lines: Sequence[bytes] = (b"a b", b"b", b"", b"c a b")
) -> TopologyGraph:
    t = Topology("words", ackers=ackers)
    made = t.bolt("split", str.split, t.spout("lines", MemorySource("lines", lines)), schema="word string")
    t.sink(MemorySink("out", staging=tmp), t.bolt("next", Passes(), made.shuffle()))
    return t


class Passes(Bolt):
    streams = "word string"

    def execute(self, tuple: Tuple, /) -> None:
        self.collector.emit(tuple["word"], anchors=tuple)
        self.collector.ack(tuple)


def without(kind: int, rows: Sequence[WireRow]) -> list[WireRow]:
    return [row for row in rows if row.edge != kind]


def only(kind: int, rows: Sequence[WireRow]) -> list[WireRow]:
    return [row for row in rows if row.edge == kind]


@pytest.mark.parametrize("last", [INIT, ACK], ids=["ack-first", "init-first"])
def test_ack_before_init(last: int, tmp_path: Path) -> None:
    """The notices of acks may come before those that begin the messages, as in Storm where they race."""

    def reorder(at: int, rows: list[WireRow]) -> list[WireRow]:
        if at == 2:
            assert only(last, rows)
        return [*without(last, rows), *only(last, rows)]

    batch = run_all(engine(tamper=reorder), words_topology(tmp_path), tmp_path, per_message=True)
    assert incomplete(batch) == set()
    assert len(batch.rows["out"]) == 6


@pytest.mark.parametrize("kind", [INIT, ACK], ids=["init", "ack"])
def test_a_notice_that_never_comes_leaves_the_message_incomplete(kind: int, tmp_path: Path) -> None:
    """Negative control: an acker that took what came for the whole would say "complete"."""

    def drop(at: int, rows: list[WireRow]) -> list[WireRow]:
        return without(kind, rows) if at == 2 else rows

    batch = run_all(engine(tamper=drop), words_topology(tmp_path), tmp_path, per_message=True)
    assert batch.mismatches, "the control rows know how many notices were sent"
    assert batch.lost == ({"0", "1", "2", "3"} if kind == ACK else batch.lost)
    assert batch.lost


class FailsLater(Bolt):
    """Acks every tuple, and at the next one fails it after all."""

    def __init__(self) -> None:
        self.before: Tuple | None = None

    def execute(self, tuple: Tuple, /) -> None:
        self.collector.ack(tuple)
        before, self.before = self.before, tuple
        if before is not None:
            self.collector.fail(before, "after all")


@modes
def test_fail_after_complete(per_message: bool, tmp_path: Path) -> None:
    """What was acked stays acked. The bolt that fails it later has made a mistake, and fails the tuple in hand by that."""
    t = Topology("fail-after-complete")
    t.bolt("2", FailsLater(), t.spout("1", feeder("1", ["1"] * 2)).global_())
    batch = run_all(engine(), t, tmp_path, per_message=per_message)
    assert incomplete(batch) == {"1"}
    (late,) = batch.report.late
    assert "it acked it before" in late.error


@modes
def test_one_failed_tuple_fails_a_message_whose_others_were_all_acked(per_message: bool, tmp_path: Path) -> None:
    t = Topology("one-of-two")
    one = t.spout("1", feeder("1", ["1"]))
    t.bolt("acks", Acks(), one.shuffle())
    t.bolt("fails", Fails(), one.shuffle())
    batch = run_all(engine(), t, tmp_path, per_message=per_message)
    assert batch.late == {"0": {"failed at fails"}}


# --- several ackers, none ------------------------------------------------------------------------------------------


def notices(kind: int, rows: Sequence[WireRow]) -> list[tuple[int, int]]:
    """(task, message) of each notice."""
    schema = INIT_SCHEMA if kind == INIT else ACK_SCHEMA
    return [(row.dest, id_) for row in only(kind, rows) for id_ in ids_in(row.payload, schema)]


def ids_in(payload: bytes | pa.Buffer, schema: pa.Schema) -> list[int]:
    return [int(id_) for id_ in pa.ipc.read_record_batch(pa.py_buffer(payload), schema).column("id").to_pylist()]


MANY = [b"w%d" % n for n in range(200)]


@pytest.mark.parametrize("ackers", [1, 2, 7])
def test_mod_hash_over_several_ackers(ackers: int, tmp_path: Path) -> None:
    """All notices of a message go to one acker task, found by its id; every task has its share of the messages."""
    seen: dict[int, list[tuple[int, int]]] = {}

    def watch(at: int, rows: list[WireRow]) -> list[WireRow]:
        if at == 2:
            seen.update({kind: notices(kind, rows) for kind in (INIT, ACK)})
        return rows

    topology = words_topology(tmp_path, ackers=ackers, lines=MANY)
    batch = run_all(engine(tamper=watch), topology, tmp_path, per_message=True)
    assert incomplete(batch) == set()
    home = dict(zip(range(200), acker_of(np.arange(200), ackers).tolist(), strict=True))
    assert {id_: task for task, id_ in seen[INIT]} == home
    assert {id_: task for task, id_ in seen[ACK]} == home
    assert len(seen[INIT]) == 200
    assert {task for task, _ in seen[INIT]} == set(range(ackers))


def test_notices_that_go_to_different_ackers_are_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: each of the two has half of the truth."""
    calls = iter(range(1_000))

    def astray(ids: Rows, ackers: int) -> Rows:
        return (acker_of(ids, ackers) + next(calls)) % ackers

    monkeypatch.setattr(account, "acker_of", astray)
    batch = run_all(engine(), words_topology(tmp_path, ackers=7, lines=MANY), tmp_path, per_message=True)
    assert len(batch.lost) > 100


class Backlogged(World):
    """A bolt that looks, while it works, at how many messages are pending."""

    def __init__(self, folder: Path, ackers: int | None) -> None:
        super().__init__([], folder)
        self.source = MemorySource("lines", [b"a", b"bad", b"b"], backoff_base_s=0.0, clock=self.clock)
        self.pending: list[int] = []
        self.topology = t = Topology("words", ackers=ackers)

        def looks(line: str) -> list[str]:
            self.pending.append(self.source.backlog().pending)
            if line == "bad":
                raise FailTuple("bad")
            return [line]

        t.sink(self.sinks[0], t.bolt("looks", looks, t.spout("lines", self.source), schema="word string"))


def test_without_ackers_a_message_is_confirmed_at_once(tmp_path: Path) -> None:
    """`TOPOLOGY_ACKERS` 0: the spout's ack comes at once, nothing is replayed; only at-most-once can be had."""
    world = Backlogged(tmp_path, 0)
    statistics = world.run(Guarantee.AT_MOST_ONCE)
    assert world.pending == [0, 0, 0]
    assert world.counts() == Counter("ab")
    assert (statistics.failed, statistics.replayed, world.source.backlog().waiting) == (1, 0, 0)
    assert world.source.dead_letters() == ()


def test_with_ackers_a_message_is_pending_until_its_verdict(tmp_path: Path) -> None:
    world = Backlogged(tmp_path, None)
    statistics = world.run(Guarantee.AT_LEAST_ONCE)
    assert world.pending[:3] == [3, 3, 3]
    assert world.counts() == Counter("ab")
    assert (statistics.failed, statistics.dead_letters) == (5, 1)


@pytest.mark.parametrize("guarantee", [Guarantee.AT_LEAST_ONCE, Guarantee.EXACTLY_ONCE])
def test_without_ackers_nothing_else_can_be_had(guarantee: Guarantee, tmp_path: Path) -> None:
    with pytest.raises(TopologyError, match="ackers=0"):
        Topology("words", guarantee, ackers=0)
    with pytest.raises(TopologyError, match="ackers=0"):
        compile_topology(words_topology(tmp_path, ackers=0), guarantee)


# --- subscribers and structure -------------------------------------------------------------------------------------


class Speaks(Bolt):
    """Emits to a stream that somebody hears, and to one that nobody does."""

    streams: ClassVar[Streams] = {"default": "at int", "unheard": "at int"}

    def __init__(self, to: str) -> None:
        self.to = to

    def execute(self, tuple: Tuple, /) -> None:
        for _ in range(3):
            self.collector.emit(tuple["at"], anchors=[tuple], stream=self.to)
        self.collector.ack(tuple)


@modes
@pytest.mark.parametrize("to", ["default", "unheard"])
def test_a_stream_without_subscribers_keeps_nobody_waiting(to: str, per_message: bool, tmp_path: Path) -> None:
    t = Topology("unheard")
    made = t.bolt("2", Speaks(to), t.spout("1", feeder("1", ["1"] * 2)).shuffle())
    t.sink(MemorySink("out", staging=tmp_path), made)
    batch = run_all(engine(), t, tmp_path, per_message=per_message)
    assert incomplete(batch) == set()
    assert len(batch.rows["out"]) == (6 if to == "default" else 0)


def test_validate_topology_structure() -> None:
    """`testValidateTopologystructure`: what cannot be wired is refused when it is added, by name."""
    t = Topology("structure")
    one = t.spout("1", feeder("1", []))
    two = t.bolt("2", Branching(1), one.fields("at"))
    with pytest.raises(TopologyError, match="no component '3'; known: 1, 2"):
        t.bolt("4", Acks(), Subscription("3"))
    with pytest.raises(TopologyError, match=r"'non-exists-field'.*known: at"):
        t.bolt("4", Acks(), one.fields("non-exists-field"))
    with pytest.raises(TopologyError, match="'2' has no output stream 'non-exists-stream'; known: default"):
        t.bolt("4", Acks(), two["non-exists-stream"].shuffle())
    with pytest.raises(TopologyError, match="'2' has no output stream 'non-exists-stream'; known: default"):
        t.bolt("4", Acks(), Subscription("2", "non-exists-stream"))
    for again in ("1", "2"):
        with pytest.raises(TopologyError, match=f"two components called '{again}'"):
            t.bolt(again, Acks(), one.shuffle())
    with pytest.raises(TopologyError, match="no sink"):
        compile_topology(t, Guarantee.EXACTLY_ONCE)
    t.bolt("4", Acks(), two.shuffle())
    assert [c.name for c in t.components] == ["1", "2", "4"], "what was refused is not there"
    compile_topology(t, Guarantee.EXACTLY_ONCE)
