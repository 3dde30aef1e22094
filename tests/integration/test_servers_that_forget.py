"""A chaos of servers: they lose their tail, remove what nobody read, give numbers again, are made again and restored.

Whatever the seed draws, each message is applied once; one that is not, or is twice, is on record: as removed, as what cannot
be told, or by the error that ended the run. Kafka's are in `test_kafka_forgets.py`.
"""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import pytest
from support.brokers import Broker, running
from support.brokers.nats_server import NatsHarness, NatsServer
from support.brokers.redis_server import RedisHarness, RedisServer
from support.databases import fresh_database
from support.queues import prepared_database
from support.source_harness import messages_of

from stormproof.core.errors import PositionMismatch
from stormproof.core.pending.continuity import CONTINUOUS, Continuity, looks_in
from stormproof.core.postgres.database import Database
from stormproof.core.source.nats.sequences import Sequences
from stormproof.core.source.nats.source import NatsSource
from stormproof.core.source.protocol import Lease, Limit
from stormproof.core.source.redis_streams.counted import Counted
from stormproof.testing import PendingSourceHarness

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]

SEEDS: Final = 20
STEPS: Final = 7
HELD_S: Final = 4.0
LIMIT: Final = Limit(messages=100, certain=True)


@dataclass
class Forgetful:
    """A server's stream, what was put into it, what became of it, and the driver that reads it."""

    server: Any
    database: Database
    rng: Random
    harness: PendingSourceHarness[Any] = field(init=False)
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    there: list[bytes] = field(default_factory=list[bytes])
    """What the server has, oldest first, and has not lost; what it removed counts apart."""
    gone: set[bytes] = field(default_factory=set[bytes])
    applied: Counter[bytes] = field(default_factory=Counter[bytes])
    epoch: int = 1
    ended: str = ""
    happened: list[str] = field(default_factory=list[str])
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _saved: list[bytes] | None = None
    _seen: int = 0
    _leases: Iterator[int] = field(default_factory=itertools.count)

    # ---- what a kind of server says

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def remove(self, unread: Sequence[bytes]) -> set[bytes]:
        """Have the server remove some of these, in a way that it has; which ones."""

    @abstractmethod
    def again(self) -> None:
        """Delete the stream, and make it again."""

    def way_on(self, error: PositionMismatch) -> dict[str, Any] | None:
        """What a user passes to go on; None: the run has ended for good."""
        if error.details["verdict"] in ("removed", "unknown"):
            return {"on_gap": "record"}
        return None

    # ---- what happens

    @property
    def unread(self) -> list[bytes]:
        return [one for one in self.there if one not in self.applied]

    def put(self) -> None:
        new = [b"%d" % next(self._numbers) for _ in range(self.rng.randint(1, 6))]
        self.harness.put(new)
        self.there += new

    def lose(self) -> None:
        if self.unread:
            removed = self.remove(self.unread)
            self.gone |= removed
            self.there = [one for one in self.there if one not in removed]

    def save(self) -> None:
        if self._saved is None:
            self.close()
            self.server.save("copy")
            self._saved = list(self.there)

    def set_back(self) -> None:
        """The server is as it was when it was saved; what came since is gone, and its numbers are given again."""
        if self._saved is not None and self._saved != self.there:
            self.close()
            self.server.set_back("copy")
            self.gone |= set(self.there) - set(self._saved)
            # What came and went between two drivers was never seen: nobody can tell that it was.
            self.gone -= {one for one in self.gone if int(one) >= self._seen}
            self.there = list(self._saved)
            self.put()
            self.put()

    def restart(self) -> None:
        self.close()
        self.server.restart()

    def made_again(self) -> None:
        self.gone |= set(self.unread)
        self.there, self._saved = [], None
        self.close()
        self.again()
        self.put()

    def close(self) -> None:
        self.harness.close()
        died = getattr(self.harness, "died", None)
        if died is not None:
            died()
        self.harness.views.clear()
        self.epoch += 1

    def drive(self) -> None:
        """One driver, until it finds nothing or ends; it goes on as its error says, where that is possible."""
        self._seen = max([self._seen, *(int(one) + 1 for one in {*self.there, *self.gone})])
        for _ in range(4):
            self.epoch += 1
            try:
                source = self.harness.view(epoch=self.epoch, **self.options)
                source.recover(self.epoch)
                idle, end_s = 0, time.monotonic() + HELD_S
                while idle < 3 or (self.unread and time.monotonic() < end_s):  # a driver that ended may hold them
                    lease = Lease(f"l{next(self._leases)}", self.epoch)
                    slice_ = source.open(lease, LIMIT, 7)
                    idle = 0 if slice_ is not None else idle + 1
                    if slice_ is not None:
                        self.applied.update(message.payload for message in messages_of(source, slice_))
                        source.confirm(lease)
                source.maintain()
                return
            except PositionMismatch as error:
                way = self.way_on(error)
                self.happened.append(f"{error.details.get('verdict', 'another')}: {way}")
                if way is None:
                    self.ended = str(error)
                    return
                self.options |= way
            finally:
                self.close()
        raise AssertionError(f"it ends for ever: {self.happened}")

    def run(self) -> None:
        """What the seed draws, a driver after each."""
        steps = [self.put, self.put, self.lose, self.lose, self.save, self.set_back, self.restart]
        self.begin()
        self.put()
        self.drive()
        for number in range(STEPS):
            step: Callable[[], None] = self.rng.choice(steps + [self.made_again] * (number == STEPS - 1))
            self.happened.append(getattr(step, "__name__", "?"))
            step()
            if step in (self.set_back, self.made_again) or self.rng.random() < 0.6:
                self.happened.append("drive")
                self.drive()
            if self.ended:
                return
        self.happened.append("drive")
        self.drive()

    # ---- what must hold

    def require(self) -> Counter[str]:
        """Nothing is lost or doubled without its record; how often which verdict is on record."""
        story = ", ".join(self.happened)
        looks = self.looks()
        verdicts = Counter(str(one.verdict) for one in looks)
        lost = [one for one in self.gone if one not in self.applied]
        untold = {Continuity.REWOUND, Continuity.ANOTHER, Continuity.UNKNOWN} & {one.verdict for one in looks}
        recorded = sum(one.messages for one in looks) + self.withdrawn()
        if not self.ended:
            assert all(self.applied[one] for one in self.there), f"never applied: {self.unread}; {story}"
            assert len(lost) <= recorded or untold, f"{len(lost)} lost, {recorded} on record; {story}"
            assert recorded <= len(lost), f"{recorded} on record, {len(lost)} lost; {story}"
        doubled = [one for one, times in self.applied.items() if times > 1]
        assert not doubled or any("adopt" in one.by for one in looks), f"doubled: {doubled}; {story}"
        if not lost and not {"set_back", "made_again"} & set(self.happened):
            assert not looks, f"an alarm where all is right: {looks}; {story}"
        return verdicts + Counter({"ended": bool(self.ended)})

    def looks(self) -> list[Any]:
        return looks_in(self.position())

    def withdrawn(self) -> int:
        return 0

    def position(self) -> dict[str, Any]:
        ((position,),) = self.harness.execute(
            f"select position from stormproof.pending_subscription where source = '{self.harness.name}'"
        )
        found: dict[str, Any] = position
        return found


def some(rng: Random, unread: Sequence[bytes]) -> list[int]:
    """A few of these, by their places."""
    return sorted(rng.sample(range(len(unread)), rng.randint(1, len(unread))))


@dataclass
class ForgetfulNats(Forgetful):
    _sequences: dict[bytes, int] = field(default_factory=dict[bytes, int])

    def begin(self) -> None:
        self.harness = NatsHarness(self.database, "S", server=self.server)

    def remove(self, unread: Sequence[bytes]) -> set[bytes]:
        """The oldest, by a purge; or any, one by one."""
        if self.rng.random() < 0.5:
            kept = self.rng.randrange(len(unread))
            self.server.ask(lambda jetstream: jetstream.purge_stream("S", keep=kept))
            return set(self.there[: len(self.there) - kept]) - set(self.applied)
        found = self.server.ask(self._stored)
        removed = {unread[place] for place in some(self.rng, unread)}
        for one in removed:
            self.server.ask(lambda jetstream, one=one: jetstream.delete_msg("S", found[one]))
        return removed

    async def _stored(self, jetstream: Any) -> dict[bytes, int]:
        state = (await jetstream.stream_info("S")).state
        found: dict[bytes, int] = {}
        for sequence in range(max(1, state.first_seq), state.last_seq + 1):
            try:
                found[(await jetstream.get_msg("S", sequence)).data] = sequence
            except Exception:  # noqa: BLE001, S112 - it was removed
                continue
        return found

    def again(self) -> None:
        self.server.delete("S")
        self.server.make("S")

    def way_on(self, error: PositionMismatch) -> dict[str, Any] | None:
        verdict = error.details.get("verdict", "another")
        return (
            {"on_new_stream": "same" if verdict == "rewound" else "adopt"}
            if verdict in ("rewound", "another")
            else (super().way_on(error))
        )


@dataclass
class ForgetfulRedis(Forgetful):
    def begin(self) -> None:
        self.harness = RedisHarness(self.database, "s", server=self.server)

    def remove(self, unread: Sequence[bytes]) -> set[bytes]:
        """The oldest, by trimming; or any, by XDEL."""
        with self.server.client() as client:
            if self.rng.random() < 0.6:
                kept = self.rng.randrange(len(unread))
                client.xtrim("s", maxlen=kept, approximate=False)
                return set(self.there[: len(self.there) - kept]) - set(self.applied)
            ids = {fields[b"payload"]: id_ for id_, fields in client.xrange("s")}
            removed = {unread[place] for place in some(self.rng, unread)}
            client.xdel("s", *(ids[one] for one in removed))
            return removed

    def again(self) -> None:
        with self.server.client() as client:
            client.delete("s")

    def withdrawn(self) -> int:
        return Counted.of(self.position()).withdrawn

    def way_on(self, error: PositionMismatch) -> dict[str, Any] | None:
        verdict = error.details.get("verdict", "another")
        return (
            {"on_new_stream": "same" if verdict == "rewound" else "adopt"}
            if verdict in ("rewound", "another")
            else (super().way_on(error))
        )


KINDS: Final[Mapping[str, tuple[type[Broker], type[Forgetful]]]] = {
    "nats": (NatsServer, ForgetfulNats),
    "redis": (RedisServer, ForgetfulRedis),
}


def chaos(kind: str, number: int, database: Database, factory: pytest.TempPathFactory) -> Counter[str]:
    server_kind, forgetful = KINDS[kind]
    with running(server_kind, factory) as server:
        one = forgetful(server, prepared_database(database), Random(f"{kind} {number}"))
        try:
            one.run()
        finally:
            one.close()
        verdicts = one.require()
        print(number, dict(verdicts), one.happened)
        return verdicts


@pytest.mark.sampled(0.02)
@pytest.mark.parametrize("number", range(SEEDS))
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_or_doubled_without_its_record(
    database: Database, tmp_path_factory: pytest.TempPathFactory, kind: str, number: int
) -> None:
    chaos(kind, number, database, tmp_path_factory)


def _blind_nats(self: NatsSource, pulled: Sequence[Any], facts: Any, upto: int) -> tuple[Any, Sequences]:
    del pulled, facts, upto
    return CONTINUOUS, self._sequences  # pyright: ignore[reportPrivateUsage]


def _blind_redis(self: Counted, facts: Any, ids: Any, *, is_all: bool) -> tuple[Any, Counted]:
    del facts, is_all
    return CONTINUOUS, self.given(ids or ())


BLIND: Final[Mapping[str, tuple[type, str, Any]]] = {
    "nats": (NatsSource, "_counted", _blind_nats),
    "redis": (Counted, "looked", _blind_redis),
}


@pytest.mark.sampled(0.34)
@pytest.mark.parametrize("kind", KINDS)
def test_control_without_a_mark_messages_are_lost_without_a_record(
    database: Database, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(*BLIND[kind])
    with pytest.raises(AssertionError, match=r"lost, \d+ on record|never applied"):
        many(kind, database, tmp_path_factory)


def many(kind: str, database: Database, factory: pytest.TempPathFactory) -> None:
    for number in range(SEEDS):
        with fresh_database(database, f"forgetful_{kind}_{number}") as fresh:
            chaos(kind, number, fresh, factory)
