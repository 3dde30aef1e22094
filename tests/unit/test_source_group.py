"""Several sources as one: keys, tokens, limits, kinds, bisection by spouts, and calls that failed half-way."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Mapping, Sequence
from random import Random

import numpy as np
import pytest
from support.source_harness import Message, messages_of

from stormproof.core.base.clock import ManualClock
from stormproof.core.base.errors import Fenced, PositionMismatch, StoreUnavailable, TopologyError, UsageError
from stormproof.core.base.message import MessageFailure
from stormproof.core.contract.source import Backlog, Expectation, Lease, Limit, Resolution, Slice
from stormproof.core.source import group as group_module
from stormproof.core.source.group import SourceGroup, SpoutReader, parts_of
from stormproof.core.source.memory import MemorySource
from stormproof.core.source.spouts import ID_LIMIT, group_name, id_of, key_of, keys_of, sources_in

SEED = 7
ANY = Limit(1_000)


def lease(owner: object = "a", epoch: int = 1) -> Lease:
    return Lease(str(owner), epoch)


def group(messages: Mapping[str, int], clock: ManualClock | None = None, max_attempts: int = 3) -> SourceGroup:
    """Sources in memory with so many messages (``lines0``, ...), subscribed."""
    clock = clock or ManualClock()
    made = SourceGroup(
        {
            spout: MemorySource(
                spout,
                numbered(spout, number),
                max_attempts=max_attempts,
                backoff_base_s=1.0,
                backoff_max_s=10.0,
                clock=clock,
                rng=Random(1),
            )
            for spout, number in messages.items()
        }
    )
    made.subscribe("s", 1)
    return made


def numbered(spout: str, number: int) -> list[bytes]:
    return [f"{spout}{n}".encode() for n in range(number)]


def opened(source: SourceGroup, owner: object, limit: Limit = ANY) -> list[Message]:
    slice_ = source.open(lease(owner), limit, SEED)
    assert slice_ is not None
    return messages_of(source, slice_)


def counts(messages: Sequence[Message]) -> dict[str, int]:
    spouts = [m.payload.rstrip(b"0123456789").decode() for m in messages]
    return {spout: spouts.count(spout) for spout in sorted(set(spouts))}


# -- keys and tokens -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 1, 63])
def test_keys_hold_every_id_up_to_the_limit(index: int) -> None:
    ids = np.array([0, 1, -1, ID_LIMIT - 1, -ID_LIMIT], np.int64)
    keys = keys_of(ids, index, "lines").tolist()
    assert [id_of(key) for key in keys] == [(index, id_) for id_ in ids.tolist()]
    assert keys == [key_of(id_, index, "lines") for id_ in ids.tolist()]


@pytest.mark.parametrize("id_", [ID_LIMIT, -ID_LIMIT - 1, 2**63 - 1])
def test_an_id_that_is_too_large_is_refused(id_: int) -> None:
    with pytest.raises(UsageError, match=rf"spout 'lines'.*id {id_};.*2\^57"):
        keys_of(np.array([5, id_, 6], np.int64), 1, "lines")
    with pytest.raises(UsageError, match="spout 'lines'"):
        key_of(id_, 1, "lines")


def test_equal_ids_of_two_spouts_have_different_keys_and_tokens() -> None:
    messages = opened(group({"lines": 50, "clicks": 50}), "a")
    assert len({m.id for m in messages}) == len({m.token for m in messages}) == 100


def test_the_expectation_is_of_what_is_read_for_every_seed_and_exclusion() -> None:
    source = group({"lines": 5, "clicks": 3})
    slice_ = source.open(lease(), ANY, SEED)
    assert slice_ is not None
    everything = messages_of(source, slice_)
    out = frozenset(m.id for m in (everything[1], everything[6]))
    for seed, excluded in ((SEED, frozenset[int]()), (2**63 - 1, out), (-5, out)):
        messages = messages_of(source, slice_, seed, excluded=excluded)
        xor = 0
        for message in messages:
            xor ^= message.token
        assert source.expect(slice_, seed, excluded) == Expectation(8 - len(excluded), xor)
        assert {m.id for m in messages} == {m.id for m in everything} - excluded
    assert source.expect(slice_, SEED, frozenset()) == slice_.expected


def test_with_one_seed_for_all_the_tokens_of_two_spouts_would_cancel(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the seeds: lost messages of both spouts would not be seen."""
    monkeypatch.setattr(group_module, "seed_of", lambda seed, _: seed)
    slice_ = group({"lines": 5, "clicks": 5}).open(lease(), ANY, SEED)
    assert slice_ is not None
    assert slice_.expected == Expectation(10, 0)


# -- slices ----------------------------------------------------------------------------------------------------------


def test_a_slice_has_messages_of_every_spout_and_survives_the_ledger() -> None:
    source = group({"lines": 3, "clicks": 2})
    slice_ = source.open(lease(), ANY, SEED)
    assert slice_ is not None
    position = json.loads(json.dumps(slice_.position, sort_keys=True))  # jsonb has an order of its own
    again = source.attach(position, slice_.expected)
    assert again == slice_
    assert messages_of(source, again) == messages_of(source, slice_)
    assert slice_.bytes == sum(len(m.payload) for m in messages_of(source, slice_))


def test_a_slice_may_lack_a_spout() -> None:
    source = group({"lines": 0, "clicks": 2})
    slice_ = source.open(lease(), ANY, SEED)
    assert slice_ is not None
    assert list(parts_of(slice_.position)) == ["clicks"]
    source.pin(lease())
    source.extend(lease())
    source.confirm(lease())
    assert source.open(lease("b"), ANY, SEED) is None
    assert source.backlog() == Backlog(0, 0, 0, 0)


def test_a_batch_of_a_spout_that_is_gone_is_refused_by_name() -> None:
    slice_ = group({"lines": 1, "clicks": 1}).open(lease(), ANY, SEED)
    assert slice_ is not None
    with pytest.raises(PositionMismatch, match=r"spout 'clicks'.*it has lines, taps"):
        group({"lines": 1, "taps": 1}).attach(slice_.position, slice_.expected)


@pytest.mark.parametrize(("parallelism", "expected"), [(1, [1, 1]), (2, [1, 1]), (4, [3, 1]), (6, [5, 1])])
def test_each_reader_is_of_one_spout_in_proportion(parallelism: int, expected: list[int]) -> None:
    source = group({"lines": 50, "clicks": 10})
    slice_ = source.open(lease(), ANY, SEED)
    assert slice_ is not None
    readers = source.readers(slice_, parallelism)
    assert all(isinstance(reader, SpoutReader) for reader in readers)
    spouts = [reader.spout for reader in readers if isinstance(reader, SpoutReader)]
    assert [spouts.count(spout) for spout in source.sources] == expected
    assert counts(messages_of(source, slice_, parallelism=parallelism)) == {"clicks": 10, "lines": 50}
    again: tuple[SpoutReader, ...] = pickle.loads(pickle.dumps(readers))  # noqa: S301 - made in this line
    assert [reader.spout for reader in again] == spouts


def test_the_limit_is_never_exceeded_and_no_spout_waits_for_long() -> None:
    source = group({"a": 40, "b": 40, "c": 40})
    taken: dict[str, int] = dict.fromkeys("abc", 0)
    for turn in range(9):
        found = counts(opened(source, turn, Limit(9)))
        assert sum(found.values()) <= 9
        for spout, number in found.items():
            taken[spout] += number
        if turn >= 2:
            assert min(taken.values()) > 0
    assert sum(taken.values()) >= 72
    assert max(taken.values()) <= 2 * min(taken.values())


def test_an_idle_spout_takes_nothing_from_the_limit() -> None:
    source = group({"lines": 30, "clicks": 0})
    assert [len(opened(source, turn, Limit(10))) for turn in range(3)] == [10, 10, 10]


def test_the_limit_in_bytes_holds_for_all_spouts_together() -> None:
    source = group({"lines": 20, "clicks": 20})  # 6 and 7 bytes each and more
    while (slice_ := source.open(lease(source.backlog().ready), Limit(100, bytes=50), SEED)) is not None:
        assert slice_.bytes <= 50
    assert source.backlog().pending == 40


def test_one_message_above_the_limit_comes_alone() -> None:
    sources = {spout: MemorySource(spout, [b"x" * 100] * 2) for spout in ("lines", "clicks")}
    source = SourceGroup(sources)
    source.subscribe("s", 1)
    assert [len(opened(source, turn, Limit(10, bytes=10))) for turn in range(4)] == [1, 1, 1, 1]


# -- failures --------------------------------------------------------------------------------------------------------


def test_failed_messages_are_told_to_their_own_source() -> None:
    clock = ManualClock()
    source = group({"lines": 3, "clicks": 3}, clock)
    failed = [m for m in opened(source, "a") if m.payload in (b"lines1", b"clicks2")]
    assert source.confirm(lease(), [m.failed() for m in failed]).retried == ("lines:1", "clicks:2")
    assert [source.shown_id(m.id, m.origin) for m in failed] == ["lines:1", "clicks:2"]
    assert source.backlog().waiting == 2
    clock.advance(100)
    retry = source.open(lease("b"), ANY, SEED)
    assert retry is not None
    assert (retry.retry, retry.replayed) == (True, tuple((m.id, 0) for m in failed))
    assert source.attach(retry.position, retry.expected) == retry


def test_retries_never_share_a_batch_with_others_and_neither_starves() -> None:
    clock = ManualClock()
    source = group({"lines": 1, "clicks": 40}, clock, max_attempts=100)
    kinds: list[bool] = []
    for turn in range(8):
        clock.advance(1_000)
        slice_ = source.open(lease(turn), Limit(4), SEED)
        assert slice_ is not None
        messages = messages_of(source, slice_)
        # The one line fails each time: it is a retry from the second time on.
        line = [m for m in messages if m.payload == b"lines0"]
        assert not (slice_.retry and len(messages) > len(line))
        kinds.append(slice_.retry)
        source.confirm(lease(turn), [m.failed() for m in line])
    assert True in kinds
    assert False in kinds[2:]
    assert source.backlog().ready <= 40 - 3 * 4


def test_dead_letters_are_told_by_spout() -> None:
    source = group({"lines": 1, "clicks": 2}, max_attempts=1)
    dead = {"lines:0", "clicks:0", "clicks:1"}
    assert set(source.confirm(lease(), [m.failed() for m in opened(source, "a")]).dead) == dead
    assert source.undecided_among([*dead, "0", "taps:0", "lines:1"]) == dead
    clicks = source.sources["clicks"]
    assert isinstance(clicks, MemorySource)
    assert clicks.drop(["1"], by="ann", why="spam") == ("1",)
    assert clicks.requeue(["0"], by="ann", why="again") == ("0",)
    assert source.undecided_among(sorted(dead)) == {"lines:0"}
    assert [m.payload for m in opened(source, "b")] == [b"clicks0"]
    assert source.backlog().dead == 1


def test_a_failure_of_a_spout_that_is_not_in_the_slice_is_refused() -> None:
    source = group({"lines": 0, "clicks": 1})
    (message,) = opened(source, "a")
    stranger = Message(key_of(0, 0, "lines"), 0, message.token, b"")
    with pytest.raises(UsageError, match="does not hold the failed message 0 of spout number 0"):
        source.confirm(lease(), [stranger.failed()])
    with pytest.raises(UsageError, match="spout number 5"):
        source.shown_id(key_of(0, 5, "lines"), 0)


def culprit_found(source: SourceGroup, poison: bytes) -> int:
    """Split every batch that has the poison until it stands alone; confirm the others. Gives the number of batches."""
    for batch in range(1, 200):
        slice_ = source.open(lease(batch), ANY, SEED)
        assert slice_ is not None
        messages = messages_of(source, slice_)
        if all(m.payload != poison for m in messages):
            source.confirm(lease(batch))
        elif len(messages) > 1:
            source.split(slice_, lease(batch))
            source.split(slice_, lease(batch))  # repeated: no effect
        else:
            source.confirm(lease(batch), [messages[0].failed()])
            return batch
    raise AssertionError("the poison never stood alone")


@pytest.mark.parametrize(
    "messages", [{"lines": 64, "clicks": 64}, {"lines": 1, "clicks": 1}, {"lines": 64, "clicks": 1}]
)
@pytest.mark.parametrize("poison", [b"lines0", b"clicks0"])
def test_a_poison_stands_alone_after_few_batches(messages: dict[str, int], poison: bytes) -> None:
    source = group(messages)
    # Alone by spouts, then halves of 64: each level costs two batches at most.
    assert culprit_found(source, poison) <= 1 + 2 + 2 * 6
    while source.open(lease("rest"), ANY, SEED) is not None:
        source.confirm(lease("rest"))
    assert source.backlog() == Backlog(0, 0, 1, 0, next_retry_in_s=source.backlog().next_retry_in_s)


def test_split_without_separating_spouts_would_never_end() -> None:
    """The negative control of splitting by spouts: one message of each is the same batch again and again."""

    class Halving(SourceGroup):
        def split(
            self, slice_: Slice, lease: Lease, alone: Sequence[int] = (), tx: object | None = None, parts: int = 2
        ) -> None:
            for source in self.sources.values():
                source.split(slice_, lease, (), tx, parts)

    source = group({"lines": 1, "clicks": 1})
    halving = Halving(source.sources)
    halving.subscribe("s", 1)
    with pytest.raises(AssertionError, match="never stood alone"):
        culprit_found(halving, b"lines0")


def test_suspects_stand_alone_at_once() -> None:
    source = group({"lines": 9, "clicks": 9})
    slice_ = source.open(lease(), ANY, SEED)
    assert slice_ is not None
    (suspect,) = [m for m in messages_of(source, slice_) if m.payload == b"lines4"]
    source.split(slice_, lease(), [suspect.id])
    batches = [[m.payload for m in opened(source, turn)] for turn in range(4)]
    assert [b"lines4"] in batches
    assert sorted(payload for batch in batches for payload in batch) == sorted(
        [*numbered("lines", 9), *numbered("clicks", 9)]
    )
    assert all(len({p.rstrip(b"0123456789") for p in batch}) == 1 for batch in batches)


def test_a_slice_on_which_a_driver_died_is_opened_spout_by_spout() -> None:
    source = group({"lines": 1, "clicks": 1})
    assert len(opened(source, "a")) == 2
    deaths: list[int] = []
    for epoch in range(2, 8):  # the driver dies of the line whenever it has it in hand
        driver = SourceGroup(source.sources)
        driver.subscribe("s", epoch)
        for owner in driver.recover(epoch):
            driver.abort(lease(owner, epoch))
        while (slice_ := driver.open(lease(f"{epoch}/{len(deaths)}", epoch), ANY, SEED)) is not None:
            (message,) = messages_of(driver, slice_)
            if message.payload == b"lines0":
                deaths.append(slice_.deaths)
                break
            driver.confirm(lease(f"{epoch}/{len(deaths)}", epoch))
    assert deaths == [1, 2, 3, 4, 5, 6]


# -- calls that fail half-way ----------------------------------------------------------------------------------------


class Unsteady(MemorySource):
    """Fails one call, as a store that goes away: before it takes effect, or after (the answer is lost)."""

    fails: str = ""
    after: bool = False

    def _call(self, verb: str) -> None:
        if self.fails == verb:
            self.fails = ""
            raise StoreUnavailable("gone")

    def open(self, lease: Lease, limit: Limit, seed: int, tx: object | None = None) -> Slice | None:
        if not self.after:
            self._call("open")
        slice_ = super().open(lease, limit, seed, tx)
        self._call("open")
        return slice_

    def confirm(self, lease: Lease, failed: Sequence[MessageFailure] = (), tx: object | None = None) -> Resolution:
        if not self.after:
            self._call("confirm")
        resolution = super().confirm(lease, failed, tx)
        self._call("confirm")
        return resolution

    def abort(self, lease: Lease, tx: object | None = None) -> None:
        if not self.after:
            self._call("abort")
        super().abort(lease, tx)
        self._call("abort")

    def recover(self, epoch: int, tx: object | None = None) -> tuple[str, ...]:
        if not self.after:
            self._call("recover")
        owners = super().recover(epoch, tx)
        self._call("recover")
        return owners


def unsteady(*, second: bool, after: bool) -> tuple[SourceGroup, Unsteady]:
    """Two sources with three messages each, of which one fails when told."""
    made = {spout: Unsteady(spout, numbered(spout, 3), rng=Random(1)) for spout in ("lines", "clicks")}
    source = SourceGroup(made)
    source.subscribe("s", 1)
    one = made["clicks" if second else "lines"]
    one.after = after
    return source, one


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("second", [False, True])
@pytest.mark.parametrize("verb", ["confirm", "abort", "recover"])
def test_a_call_that_failed_half_way_is_made_again(verb: str, second: bool, after: bool) -> None:
    source, one = unsteady(second=second, after=after)
    failed = [m.failed() for m in opened(source, "a")[:1]]
    one.fails = verb
    calls: dict[str, Callable[[], object]] = {
        "confirm": lambda: source.confirm(lease(), failed),
        "abort": lambda: source.abort(lease()),
        "recover": lambda: source.recover(1),
    }
    with pytest.raises(StoreUnavailable):
        calls[verb]()
    calls[verb]()
    backlog = source.backlog()
    left = (backlog.ready, backlog.pending, backlog.waiting)
    assert left == {"confirm": (0, 0, 1), "abort": (6, 0, 0), "recover": (0, 6, 0)}[verb]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("second", [False, True])
def test_what_an_opening_took_before_it_failed_is_given_back(second: bool, after: bool) -> None:
    source, one = unsteady(second=second, after=after)
    one.fails = "open"
    with pytest.raises(StoreUnavailable):
        source.open(lease(), ANY, SEED)
    for owner in source.recover(1):
        source.abort(lease(owner))
    assert len(opened(source, "b")) == 6


def test_a_lease_that_lapsed_in_one_source_cannot_be_held() -> None:
    clocks = {"lines": ManualClock(), "clicks": ManualClock()}
    source = SourceGroup({s: MemorySource(s, numbered(s, 1), clock=clock) for s, clock in clocks.items()})
    source.subscribe("s", 1)
    opened(source, "a")
    clocks["clicks"].advance(31)
    with pytest.raises(Fenced):
        source.pin(lease())
    with pytest.raises(Fenced):
        source.extend(lease())


def test_hold_is_for_who_opened_or_recovered() -> None:
    source = group({"lines": 1, "clicks": 1})
    opened(source, "a")
    other = SourceGroup(source.sources)
    with pytest.raises(Fenced, match="was not opened or recovered here"):
        other.pin(lease())
    assert other.recover(1) == ("a",)
    other.pin(lease())


# -- all together ----------------------------------------------------------------------------------------------------


def test_a_transaction_is_joined_by_all_or_by_none() -> None:
    class Joining(MemorySource):
        def joins(self, tx: object) -> bool:
            return tx == "mine"

    joining, other = Joining("lines"), MemorySource("clicks")
    assert SourceGroup({"lines": joining, "clicks": Joining("clicks")}).joins("mine")
    assert not SourceGroup({"lines": joining, "clicks": other}).joins("mine")


def test_every_source_is_closed_even_if_one_cannot() -> None:
    closed: list[str] = []

    class Closing(MemorySource):
        def close(self) -> None:
            closed.append(self.name)
            if self.name == "clicks":
                raise StoreUnavailable("gone")

    source = SourceGroup({name: Closing(name) for name in ("lines", "clicks", "taps")})
    with pytest.raises(StoreUnavailable):
        source.close()
    assert sorted(closed) == ["clicks", "lines", "taps"]


def test_decoders_are_by_spout() -> None:
    source = SourceGroup({"lines": MemorySource("lines"), "clicks": MemorySource("c", schema="n int, at string")})
    assert {spout: decoder.schema.names for spout, decoder in source.decoders.items()} == {
        "lines": ["line"],
        "clicks": ["n", "at"],
    }
    with pytest.raises(UsageError, match="decoders"):
        _ = source.decoder


def test_two_spouts_may_read_one_store() -> None:
    store = MemorySource("lines", numbered("lines", 2))
    source = SourceGroup({"a": store.view("one"), "b": store.view("two")})
    source.subscribe("s", 1)
    assert counts(opened(source, "x")) == {"lines": 4}


def test_the_name_names_spouts_and_sources() -> None:
    assert group({"lines": 0, "clicks": 0}).name == "lines+clicks"
    odd = {"lines": "lines", "clicks": "a+b=c%"}
    assert group_name(odd) == "lines+clicks=a%2Bb%3Dc%25"
    assert sources_in(group_name(odd)) == odd
    for single in ("lines", "a=b", "", "lines+", "+lines", "a=b=c+d"):
        assert sources_in(single) == {}


def test_groups_that_cannot_be_are_refused() -> None:
    one, two = MemorySource("one"), MemorySource("two")
    with pytest.raises(TopologyError, match="2 to 64 spouts, not 1"):
        SourceGroup({"one": one})
    with pytest.raises(TopologyError, match="2 to 64 spouts, not 65"):
        SourceGroup({f"s{n}": MemorySource("x") for n in range(65)})
    with pytest.raises(TopologyError, match="'a' and 'b' have the same source object"):
        SourceGroup({"a": one, "b": one})
    with pytest.raises(TopologyError, match="a group itself"):
        SourceGroup({"a": one, "b": SourceGroup({"c": one, "d": two})})
    with pytest.raises(TopologyError, match="spout name 'a:b'"):
        SourceGroup({"a:b": one, "c": two})
