"""A server that forgets, as a seed draws it, a driver that reads it, and a model of what must come of that.

The server loses its tail, removes what nobody read, gives numbers again, is made again, and is restored from a copy. Each
message is applied once; one that is not, or is twice, is on record: as removed, as what cannot be told, or by the error that
ended the run.
"""

from __future__ import annotations

import itertools
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, ClassVar, Final

from stormproof.core.base.errors import PositionMismatch, StoreUnavailable
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.pending.continuity import Continuity, looks_in
from stormproof.core.postgres.database import Database
from stormproof.core.source.redis_streams.client import Counted
from stormproof.testing import PendingSourceHarness
from support.brokers import Broker, started, until
from support.brokers.kafka import KafkaBroker
from support.brokers.nats_server import NatsHarness, NatsServer
from support.brokers.rabbitmq_server import RabbitMQServer, RabbitMQStreamHarness
from support.brokers.redis_server import RedisHarness, RedisServer
from support.kafka_source import KafkaHarness
from support.queues import prepared_database
from support.source_harness import messages_of

SEEDS: Final = 20
STEPS: Final = 7
HELD_S: Final = 4.0
AWAY_S: Final = 90.0
WAYS_MAX: Final = 4
LIMIT: Final = Limit(messages=100, certain=True)


@dataclass
class Forgetful:
    """A server's stream, what was put into it, what became of it, and the driver that reads it."""

    MAY_DOUBT: ClassVar[bool] = False
    """Whether what is right may look as if it were not, to anybody."""

    EXACT: ClassVar[bool] = True
    """Whether each number that the server gives has a message."""

    server: Any
    database: Database
    rng: Random
    harness: PendingSourceHarness[Any] = field(init=False)
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    there: list[bytes] = field(default_factory=list[bytes])
    """What the server has, oldest first, and has not lost; what it removed counts apart."""
    gone: set[bytes] = field(default_factory=set[bytes])
    applied: Counter[bytes] = field(default_factory=Counter[bytes])
    verdicts: Counter[str] = field(default_factory=Counter[str])
    """What came of subscriptions that were given up for one under another name."""
    epoch: int = 1
    ended: str = ""
    happened: list[str] = field(default_factory=list[str])
    _numbers: Iterator[int] = field(default_factory=itertools.count)
    _saved: list[bytes] | None = None
    _seen: int = 0
    _upset: bool = False
    """Whether the server was set back, or made again, since its subscription began."""
    _leases: Iterator[int] = field(default_factory=itertools.count)

    # ---- what a kind of server says

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def remove(self, unread: Sequence[bytes]) -> set[bytes]:
        """Have the server remove some of these, in a way that it has; which ones it removed of all that it had."""

    @abstractmethod
    def again(self) -> None:
        """Delete the stream, and make it again."""

    def refresh(self) -> None:
        """See what the server has removed by itself; by default it does so when it is told."""

    def way_on(self, error: PositionMismatch) -> dict[str, Any] | None:
        """What a user passes to go on; None: the run has ended for good."""
        verdict = error.details.get("verdict", "another")
        if verdict in ("removed", "unknown"):
            return {"on_gap": "record"}
        return {"on_new_stream": "same" if verdict == "rewound" else "adopt"}

    def send(self, new: Sequence[bytes]) -> None:
        """Give these to the server."""
        self.harness.put(new)

    def restore(self, saved: Sequence[bytes]) -> list[bytes]:
        """Set the server back to its copy; what it has then."""
        self.server.set_back("copy")
        return list(saved)

    # ---- what happens

    @property
    def unread(self) -> list[bytes]:
        return [one for one in self.there if one not in self.applied]

    def put(self) -> None:
        new = [b"%d" % next(self._numbers) for _ in range(self.rng.randint(1, 6))]
        self.there += new
        self.send(new)

    def lose(self) -> None:
        if not self.unread:
            self.put()
        self._account(self.remove(self.unread))

    def _account(self, removed: set[bytes]) -> None:
        self.gone |= removed
        self.there = [one for one in self.there if one not in removed]

    def save(self) -> None:
        if self._saved is None:
            self.close()
            self.server.save("copy")
            self._saved = list(self.there)

    def set_back(self) -> None:
        """The server is as it was when it was saved; what came since is gone, and its numbers are given again."""
        if self._saved is None:
            self.save()
        elif self._saved != self.there:
            self.close()
            left = self.restore(self._saved)
            self.gone |= set(self.there) - set(left)
            # What came and went between two drivers was never seen: nobody can tell that it was.
            self.gone -= {one for one in self.gone if int(one) >= self._seen}
            self.there = left
            self._upset = True
            self.put()
            self.put()

    def restart(self) -> None:
        self.close()
        self.server.restart()

    def made_again(self) -> None:
        self.gone |= set(self.unread)
        self.there, self._saved, self._upset = [], None, True
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
        end_s = time.monotonic() + AWAY_S
        ways = 0
        while ways < WAYS_MAX and time.monotonic() < end_s:
            self.epoch += 1
            try:
                source = self.harness.view(epoch=self.epoch, **self.options)
                source.recover(self.epoch)
                idle, held_s = 0, time.monotonic() + HELD_S
                while idle < 3 or (self.unread and time.monotonic() < held_s):  # a driver that ended may hold them
                    lease = Lease(f"l{next(self._leases)}", self.epoch)
                    slice_ = source.open(lease, LIMIT, 7)
                    idle = 0 if slice_ is not None else idle + 1
                    if slice_ is not None:
                        self.applied.update(message.payload for message in messages_of(source, slice_))
                        source.confirm(lease)
                source.maintain()
                return
            except StoreUnavailable as error:  # as a run does, which waits for a server that has just started
                self.happened.append(f"away: {str(error)[:100]}")
            except PositionMismatch as error:
                ways += 1
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
        self.refresh()
        story = ", ".join(self.happened)
        looks = self.looks()
        verdicts = Counter(str(one.verdict) for one in looks)
        lost = [one for one in self.gone if one not in self.applied]
        untold = {Continuity.REWOUND, Continuity.ANOTHER, Continuity.UNKNOWN} & {one.verdict for one in looks}
        recorded = sum(one.messages for one in looks) + self.withdrawn()
        if not self.ended:
            assert all(self.applied[one] for one in self.there), f"never applied: {self.unread}; {story}"
            assert len(lost) <= recorded or untold, f"{len(lost)} lost, {recorded} on record; {story}"
            assert recorded <= len(lost) or (lost and not self.EXACT), (
                f"{recorded} on record, {len(lost)} lost; {story}"
            )
        assert not self.doubled() or any("adopt" in one.by for one in looks), f"doubled: {self.doubled()}; {story}"
        if not lost and not {"set_back", "made_again"} & set(self.happened):
            alarms = [one for one in looks if not self.MAY_DOUBT or one.verdict is not Continuity.UNKNOWN]
            assert not alarms, f"an alarm where all is right: {alarms}; {story}"
        return self.verdicts + verdicts + Counter({"ended": int(bool(self.ended))})

    def doubled(self) -> list[bytes]:
        return [one for one, times in self.applied.items() if times > 1]

    def looks(self) -> list[Any]:
        return looks_in(self.position())

    def withdrawn(self) -> int:
        return 0

    def position(self) -> dict[str, Any]:
        ((position,),) = self.harness.execute(
            "select position from stormproof.pending_subscription where source = "
            f"'{self.options.get('name', self.harness.name)}'"
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


@dataclass
class ForgetfulLog(Forgetful):
    """Offsets that are read as ranges: where they are not the same any more, a subscription under another name begins."""

    def way_on(self, error: PositionMismatch) -> dict[str, Any] | None:
        verdict = error.details.get("verdict", "another")
        if verdict in ("removed", "unknown"):
            return {"on_gap": "record"}
        story = ", ".join(self.happened)
        assert self._upset, f"refused where all is right: {error}; {story}"
        assert not self.doubled(), f"doubled: {self.doubled()}; {story}"
        self.verdicts += Counter([f"refused as {verdict}", *(str(one.verdict) for one in self.looks())])
        self.applied.clear()
        self.gone.clear()
        self._upset = False
        return {"name": f"another {self.epoch}", "on_gap": "fail"}


@dataclass
class ForgetfulKafka(ForgetfulLog):
    _offsets: dict[bytes, tuple[int, int]] = field(default_factory=dict[bytes, tuple[int, int]])
    """The partition and the offset of each message."""

    def begin(self) -> None:
        self.harness = KafkaHarness(self.database, self.server, partitions=2)

    @property
    def topic(self) -> str:
        return self.harness.name

    def send(self, new: Sequence[bytes]) -> None:
        for partition in (0, 1):
            mine = [one for one in new if int(one) % 2 == partition]
            end = self.server.end(self.topic, partition)
            self.server.put(self.topic, mine, partition)
            self._offsets.update((one, (partition, end + place)) for place, one in enumerate(mine))

    def remove(self, unread: Sequence[bytes]) -> set[bytes]:
        """A partition's oldest, as retention by size does; or all, by retention by time."""
        if self.rng.random() < 0.7:
            partition, offset = self._offsets[self.rng.choice(unread)]
            self.server.remove_below(self.topic, partition, offset + 1)
            return {one for one in self.there if self._offsets[one][0] == partition and self._offsets[one][1] <= offset}
        self.server.configure(self.topic, retention_ms="1")
        for partition in (0, 1):
            until(lambda partition=partition: self._is_empty(partition), "retention removes nothing")
        self.server.configure(self.topic, retention_ms="3600000")
        return set(self.there)

    def _is_empty(self, partition: int) -> bool:
        return bool(self.server.end(self.topic, partition, "earliest") == self.server.end(self.topic, partition))

    def restore(self, saved: Sequence[bytes]) -> list[bytes]:
        """All of it, or the log of one partition, as after an unclean election."""
        partition = self.rng.choice([None, 0, 1])
        if partition is None:
            return super().restore(saved)
        self.server.set_back("copy", f"data/{self.topic}-{partition}")
        kept = [one for one in saved if self._offsets[one][0] == partition]
        return [*kept, *(one for one in self.there if self._offsets[one][0] != partition)]

    def again(self) -> None:
        self.server.delete(self.topic)
        self.server.topic(2, self.topic)


@dataclass
class ForgetfulStream(ForgetfulLog):
    """A RabbitMQ stream, whose broker removes its oldest segments as others come: all that it can remove."""

    MAY_DOUBT = True  # the last message that was opened may be the last one that was removed
    EXACT = False  # segments begin with an offset that the broker keeps for itself

    def begin(self) -> None:
        small: dict[str, object] = {"x_max_length_bytes": 20_000, "x_stream_max_segment_size_bytes": 5_000}
        self.harness = RabbitMQStreamHarness(self.database, "s", server=self.server, arguments=small)
        self.server.until_kept("rabbit_stream_coordinator", "coordination")

    def send(self, new: Sequence[bytes]) -> None:
        """Whatever comes may make the broker remove something."""
        self.server.until_up(self.harness.name)
        super().send(new)
        self.refresh()

    def remove(self, unread: Sequence[bytes]) -> set[bytes]:
        """The oldest, for many large ones."""
        many = [b"%d" % next(self._numbers) + b" " * 500 for _ in range(self.rng.randint(40, 60))]
        self.there += many
        self.server.until_up(self.harness.name)
        super().send(many)
        return self._removed()

    def _removed(self) -> set[bytes]:
        """What stands before the first message that is left. It may become more, a moment later."""
        self.server.until_up(self.harness.name)
        first = int(self.server.first(self.harness.name))
        return {one for one in self.there if int(one) < first}

    def refresh(self) -> None:
        self._account(self._removed())

    def again(self) -> None:
        assert isinstance(self.harness, RabbitMQStreamHarness)
        self.server.delete(self.harness.name)
        self.harness.declare()


KINDS: Final[Mapping[str, tuple[type[Broker], type[Forgetful]]]] = {
    "nats": (NatsServer, ForgetfulNats),
    "redis": (RedisServer, ForgetfulRedis),
    "kafka": (KafkaBroker, ForgetfulKafka),
    "rabbitmq": (RabbitMQServer, ForgetfulStream),
}


def chaos(kind: str, number: int, database: Database, folder: Path) -> Counter[str]:
    """What one seed draws; how often which verdict is on record."""
    server_kind, forgetful = KINDS[kind]
    with started(server_kind, folder / f"{kind}-{number}") as server:
        one = forgetful(server, prepared_database(database), Random(f"{kind} {number}"))
        try:
            one.run()
        finally:
            one.close()
        return one.require()
