"""A consumer group of a stream: what is asked of the server, and what its errors mean.

Each of a stream's entries is accounted for: given to a driver, or removed by the server and decided on.

The server counts the entries that were ever added. Where all that is left of them was not given to us yet, or nothing is
left to give, the difference to what is accounted for was removed before it was read. What the server says of the group is
not relied on: one XDEL makes it unknown. Servers before 7.0 do not count.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from typing import Any, Final, NamedTuple, NoReturn
from urllib.parse import parse_qs, urlsplit

from stormproof.core.base.dataset import DatasetName, at_server
from stormproof.core.base.errors import Json, MissingRight, PositionMismatch, StoreUnavailable, UsageError
from stormproof.core.base.extras import required
from stormproof.core.base.message import storable_text
from stormproof.core.pending.continuity import CONTINUOUS, Continuity, ContinuityLook

IDENTITY: Final = "stormproof-identity:"
"""Begins the name of a consumer that never reads. The group has it from its beginning, so it tells a group, and with it its
stream, from one that was made again: the server deletes it with them."""
CONSUMER: Final = "stormproof-driver:"
IDLE_CONSUMER_MS: Final = 3_600_000
"""After so long, drivers' consumers that hold nothing are removed."""
TIMEOUT_S: Final = 10.0

_FACTS: Final = """
local function map(flat) local t = {} for i = 1, #flat, 2 do t[flat[i]] = flat[i + 1] end return t end
local function above(one, other)
  local a, b = {string.match(one, '(%d+)-(%d+)')}, {string.match(other, '(%d+)-(%d+)')}
  for i = 1, 2 do if a[i] ~= b[i] then return #a[i] > #b[i] or (#a[i] == #b[i] and a[i] > b[i]) end end
  return false
end
local function group()
  if redis.call('EXISTS', KEYS[1]) == 0 then return nil end
  for _, g in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local m = map(g)
    if m['name'] == ARGV[1] then return m end
  end
end
local function facts(anchor)
  local s = map(redis.call('XINFO', 'STREAM', KEYS[1]))
  local first = s['first-entry'] and s['first-entry'][1] or ''
  local there = anchor ~= '' and #redis.call('XRANGE', KEYS[1], anchor, anchor) or 0
  local g, deleted = group(), s['max-deleted-entry-id'] or '0-0'
  return {
    s['entries-added'] or -1, s['length'], first, s['last-generated-id'], deleted, there,
    g['entries-read'] or -1, g['last-delivered-id']
  }
end
"""
_MAKE: Final = f"""{_FACTS}
local made = redis.pcall('XGROUP', 'CREATE', KEYS[1], ARGV[1], ARGV[2], 'MKSTREAM')
local is_new = not (type(made) == 'table' and made['err'] and string.find(made['err'], 'BUSYGROUP'))
if is_new and made['err'] then return made end
return {{is_new and 1 or 0, facts('')}}
"""
"""Makes the group where it is missing, and tells what the stream has at that moment."""

_READ: Final = f"""{_FACTS}
if not group() then return {{'gone'}} end
local same = false
for _, c in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  if map(c)['name'] == ARGV[4] then same = true end
end
if not same then return {{'gone'}} end
local f, read, last = facts(ARGV[7]), tonumber(ARGV[5]), ARGV[6]
if last == '' then read, last = f[7], f[8] end
local only_new = f[3] == '' or above(f[3], last)
local counts = f[1] >= 0 and read >= 0
local back = above(last, f[4]) or (counts and f[1] < read)
back = back or (not only_new and ARGV[7] == last and f[6] == 0 and above(last, f[5]))
if ARGV[8] == '' and (back or (only_new and (not counts or f[1] - f[2] ~= read))) then
  return {{'look', f, {{}}}}
end
local found = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', ARGV[3], 'STREAMS', KEYS[1], '>')
return {{'read', f, found and found[1][2] or {{}}}}
"""
"""New entries, if the stream is the one that it was, and none were removed before they were read but what is decided on:
asked in one step. Else what the stream has.
"""

SWEEP: Final = """
local removed = 0
for _, flat in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  local c = {}
  for i = 1, #flat, 2 do c[flat[i]] = flat[i + 1] end
  if string.sub(c['name'], 1, #ARGV[2]) == ARGV[2] and c['pending'] == 0 and c['idle'] > tonumber(ARGV[3]) then
    redis.call('XGROUP', 'DELCONSUMER', KEYS[1], ARGV[1], c['name'])
    removed = removed + 1
  end
end
return removed
"""
"""Removes consumers that hold nothing; in one step, since a consumer's entries are lost with it."""

_IDS_A_CALL: Final = 1_000

ANEW: Final = (
    "If only its group was deleted, or the server was set back, pass on_new_stream='same': entries that were applied are "
    "known by their ids. To read the stream that is there now from its start as a new one, pass on_new_stream='adopt', or "
    "give the topology another name"
)


class StreamEntry(NamedTuple):
    """One entry of the stream."""

    id: str
    fields: Mapping[bytes, bytes]


class Group:
    """One consumer group of one stream, over connections of its own. Every call may raise `StoreUnavailable`."""

    def __init__(self, url: str, stream: str, name: str, where: str) -> None:
        redis = required("redis", "redis", where)
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self._errors = redis.exceptions
        self._stream = stream
        self.name = name
        self._where = where
        try:
            # A read that is tried again behind our back would leave the first one's entries with nobody.
            self._client: Any = redis.Redis.from_url(
                url, socket_timeout=TIMEOUT_S, socket_connect_timeout=TIMEOUT_S, retry=Retry(NoBackoff(), 0)
            )
        except (ValueError, TypeError) as error:
            raise UsageError(
                f"{where}: the url cannot be read; write redis://[USER:PASSWORD@]HOST:PORT/DATABASE, rediss:// for TLS "
                "or unix://PATH",
                source=stream,
            ) from _unseen(error)
        if self._client.get_encoder().decode_responses:
            raise UsageError(f"{where}: the url asks for decode_responses; leave it away", source=stream)

    @contextmanager
    def _asked(self) -> Generator[None]:
        """What the server's errors mean."""
        errors = self._errors
        try:
            yield
        except errors.AuthenticationError as error:
            self._refused(error, "give the right user and password in url")
        except errors.NoPermissionError as error:
            self._refused(
                error, f"as an administrator: ACL SETUSER USER ~{self._stream} +@stream +@scripting +exists +ping"
            )
        except (errors.ConnectionError, errors.TimeoutError, errors.ReadOnlyError, errors.ClusterDownError) as error:
            raise StoreUnavailable(f"{self._where}: {_text(error)}", source=self._stream) from error
        except errors.ResponseError as error:
            text = _text(error)
            if text.startswith(("NOGROUP", "UNBLOCKED")) or "no such key" in text.lower():
                raise self.gone() from error
            if text.startswith(("LOADING", "MASTERDOWN", "TRYAGAIN", "BUSY ", "OOM", "MISCONF", "NOREPLICAS")):
                raise StoreUnavailable(f"{self._where}: {text}", source=self._stream) from error
            if text.startswith("WRONGTYPE"):
                raise UsageError(
                    f"{self._where}: the key {self._stream!r} is not a stream; name a stream", source=self._stream
                ) from error
            raise UsageError(f"{self._where}: the server refuses a command: {text}", source=self._stream) from error

    def _refused(self, error: Exception, next_step: str) -> NoReturn:
        raise MissingRight(f"{self._where}: {_text(error)}; {next_step}", source=self._stream) from error

    def gone(self) -> PositionMismatch:
        """The stream, or its group, is another one than the position was taken from."""
        return PositionMismatch(
            f"{self._where}: the stream or its consumer group {self.name} was deleted since it was first read, and "
            f"perhaps made again: which of its entries were applied cannot be told from ids. {ANEW}",
            source=self._stream,
            group=self.name,
        )

    # ---- its identity

    def make(self, start: str, identity: str, *, anew: bool = False) -> tuple[str, Counted]:
        """Make stream and group where they are missing, with this identity; `anew`: the group also where it is there.

        Gives the identity that the group has, and what is accounted for: all that is not there any more.
        """
        with self._asked():
            if anew:
                self._client.xgroup_destroy(self._stream, self.name)
            is_new, facts = self._client.eval(_MAKE, 1, self._stream, self.name, start)
            found = self.identity()
            if found is None:
                self._client.xgroup_createconsumer(self._stream, self.name, IDENTITY + identity)
        return found or identity, Counted.begun(_facts(facts), is_new=bool(is_new))

    def identity(self) -> str | None:
        """The group's identity; None: it has none, or there is no such group."""
        with self._asked():
            try:
                consumers = self._client.xinfo_consumers(self._stream, self.name)
            except self._errors.ResponseError as error:
                text = _text(error)
                if text.startswith("NOGROUP") or "no such key" in text.lower():
                    return None
                raise
        names = sorted(name for one in consumers if (name := _name_of(one)).startswith(IDENTITY))
        return names[0].removeprefix(IDENTITY) if names else None

    # ---- its entries

    def read(
        self, consumer: str, limit: int, identity: str, known: Counted | None, *, looked: bool
    ) -> tuple[list[StreamEntry] | None, StreamCounts]:
        """Entries that nobody was given. None where it is to be `looked` first at what the stream has. Without `known`, that
        is compared with what the server says of the group.

        Raises:
            PositionMismatch: the stream is another one.
        """
        with self._asked():
            answer = self._client.eval(
                *(_READ, 1, self._stream, self.name, consumer, limit, IDENTITY + identity),
                *((known.read, known.last, known.anchor) if known else (0, "", "")),
                "looked" if looked else "",
            )
        if _str(answer[0]) == "gone":
            raise self.gone()
        entries = [StreamEntry(_str(id_), _fields(flat)) for id_, flat in answer[2]]
        return entries if _str(answer[0]) == "read" else None, _facts(answer[1])

    def given_behind(self, last: str) -> list[str]:
        """Ids above this one of entries that drivers were given and that nobody has confirmed, in their order."""
        found: list[str] = []
        with self._asked():
            while ids := self._client.xpending_range(self._stream, self.name, f"({last}", "+", _IDS_A_CALL):
                found += [_str(one["message_id"]) for one in ids]
                last = found[-1]
        return found

    def held_by_others(self, consumer: str, limit: int, idle_ms: int) -> list[str]:
        """Ids of entries that other consumers were given and that nobody has confirmed."""
        with self._asked():
            summary = self._client.xpending(self._stream, self.name)
            holders = [_name_of(one) for one in summary["consumers"] or () if _name_of(one) != consumer]
            ids: list[str] = []
            for holder in holders:
                if len(ids) >= limit:
                    break
                found = self._client.xpending_range(
                    self._stream, self.name, "-", "+", limit - len(ids), holder, idle_ms or None
                )
                ids += [_str(one["message_id"]) for one in found]
        return ids

    def removed(self, ids: Sequence[str]) -> list[str]:
        """Those of these entries that are not in the stream any more."""
        with self._asked():
            pipe = self._client.pipeline(transaction=False)
            for id_ in ids:
                pipe.xrange(self._stream, id_, id_)
            return [id_ for id_, found in zip(ids, pipe.execute(), strict=True) if not found]

    def claim(self, consumer: str, ids: Sequence[str], idle_ms: int) -> list[StreamEntry]:
        """Take these entries over; those that another took meanwhile are left out."""
        if not ids:
            return []
        with self._asked():
            found = self._client.xclaim(self._stream, self.name, consumer, idle_ms, list(ids))
        return [StreamEntry(_str(id_), fields) for id_, fields in found if id_ is not None and fields is not None]

    def confirm(self, ids: Sequence[str]) -> None:
        """The group has done with these entries; an id that it does not hold is no error."""
        with self._asked():
            pipe = self._client.pipeline(transaction=False)
            for first in range(0, len(ids), _IDS_A_CALL):
                pipe.xack(self._stream, self.name, *ids[first : first + _IDS_A_CALL])
            pipe.execute()

    def sweep(self) -> None:
        """Remove drivers' consumers that hold nothing."""
        with self._asked():
            self._client.eval(SWEEP, 1, self._stream, self.name, CONSUMER, IDLE_CONSUMER_MS)

    def close(self) -> None:
        """Let connections go."""
        self._client.close()


def _facts(found: Sequence[Any]) -> StreamCounts:
    added, length, first, last, deleted, there, group_read, group_last = found
    return StreamCounts(
        added=int(added),
        length=int(length),
        first=_str(first),
        last=_str(last),
        deleted=_str(deleted),
        has_anchor=bool(there),
        group_read=int(group_read),
        group_last=_str(group_last),
    )


def _fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    if len(flat) == 2:
        return {flat[0]: flat[1]}
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _name_of(consumer: Any) -> str:
    return _str(consumer["name"])


def _str(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _text(error: Exception) -> str:
    return storable_text(str(error) or type(error).__name__, 500)


def _unseen(error: Exception) -> Exception:
    """The error without its text, which may have the url with its password."""
    return type(error)("the client cannot read the url")


def dataset_at(url: str, stream: str) -> DatasetName:
    """A stream as others call it, with the number of its database where that is not 0."""
    parts = urlsplit(url)
    given = parse_qs(parts.query).get("db", [parts.path.strip("/")])[0]
    database = int(given) if given.isascii() and given.isdigit() else 0
    return at_server("redis", url, stream, port=6379, within=str(database) if database else "")


# ---- how many of a stream's entries are accounted for

NONE = "0-0"


class StreamCounts(NamedTuple):
    """What a stream has. `added`: entries that were ever added; -1: the server does not count. `first` and `last`: the ids
    of the first entry ("": none is left) and of the newest ever; `deleted` is the highest id that XDEL ever removed.
    `has_anchor`: whether the entry is there that trimming takes before any that was not read. `group_read` and `group_last`
    are what the server says of the group: entries that it was given (-1: unknown), and the last of them.
    """

    added: int
    length: int
    first: str
    last: str
    deleted: str
    has_anchor: bool
    group_read: int
    group_last: str


def order(id_: str) -> tuple[int, int]:
    """An entry's id, to be compared."""
    time, _, number = id_.partition("-")
    return int(time), int(number or 0)


@dataclass(frozen=True, slots=True)
class Counted:
    """`read` of the entries that were ever added are accounted for (-1: it is not known how many), up to the id `last`.

    `anchor` is an entry that stands before those that were not read. `exact` is what `last` was when it was last known what
    is missing, and `deleted` the highest id of XDEL then. XDEL removed `withdrawn` entries before they were read.
    """

    read: int = -1
    last: str = NONE
    anchor: str = ""
    deleted: str = NONE
    withdrawn: int = 0
    exact: str = NONE

    @classmethod
    def begun(cls, facts: StreamCounts, *, is_new: bool) -> Counted:
        """Where the group is, which is new or was there; what the stream has not any more is not missed."""
        last, read = facts.group_last, facts.added if is_new else facts.group_read
        one = cls(read, last, facts.first if last == NONE else last, facts.deleted, exact=last)
        return replace(one, read=facts.added - facts.length) if facts.added >= 0 and one.is_before_all(facts) else one

    def is_before_all(self, facts: StreamCounts) -> bool:
        """Whether nothing is left of what was read: each entry of the stream is a new one."""
        return not facts.first or order(facts.first) > order(self.last)

    def given(self, ids: Sequence[str]) -> Counted:
        """These, ascending, were given to a driver, too; those that were given before do not count."""
        new = ids[bisect_right(ids, order(self.last), key=order) :]
        if not new:
            return self
        return replace(self, read=self.read + len(new) if self.read >= 0 else -1, last=new[-1], anchor=new[-1])

    def looked(self, facts: StreamCounts, ids: Sequence[str] | None, *, is_all: bool) -> tuple[ContinuityLook, Counted]:
        """What a look has shown, and how many are accounted for after it. `ids` were given by it; None: none was asked for.
        `is_all`: nothing else is left.
        """
        now = self.given(ids or ())
        unread = 0 if is_all else facts.length
        is_exact = is_all or (ids is None and self.is_before_all(facts))
        if ids is None and self._is_set_back(facts):
            last = min(self.last, facts.last, key=order)
            return self._rewound(facts), replace(now, read=-1, last=last, anchor=last)
        if facts.added < 0 or now.read < 0:
            look = self._untold(facts) if ids is None and self.is_before_all(facts) else CONTINUOUS
            return look, replace(now, read=facts.added - unread) if is_exact and facts.added >= 0 else now
        missing = facts.added - unread - now.read
        if not is_exact:
            return CONTINUOUS, now
        after = replace(now, read=now.read + missing, deleted=facts.deleted, exact=now.last)
        if not missing:
            return CONTINUOUS, after
        if missing < 0:
            return self._rewound(facts), after
        if is_all or not facts.first:  # so all up to the newest is accounted for
            after = replace(after, last=facts.last, anchor=facts.last, exact=facts.last)
        was_deleted = order(facts.deleted) > order(self.exact)
        is_one = missing == 1 and facts.deleted != self.deleted and order(facts.deleted) > order(self.last)
        if was_deleted and (facts.has_anchor or is_one):
            return CONTINUOUS, replace(after, withdrawn=now.withdrawn + missing)
        before = facts.first or "the stream's end"
        text = f"{missing} entries between {self.last} and {before} were removed from the stream before they were read"
        if was_deleted:
            text += ", and whether all of them were deleted one by one (XDEL), or some were trimmed, cannot be told"
            return ContinuityLook(Continuity.UNKNOWN, text, missing, self.last, before), after
        return ContinuityLook(Continuity.REMOVED, f"{text} (MAXLEN, XTRIM)", missing, self.last, before), after

    def _is_set_back(self, facts: StreamCounts) -> bool:
        """Whether what was read is not there, and nothing but a server that was set back explains it."""
        is_gone = self.anchor == self.last and not facts.has_anchor and not self.is_before_all(facts)
        return (
            order(self.last) > order(facts.last)
            or 0 <= facts.added < self.read
            or (is_gone and order(facts.deleted) < order(self.last))
        )

    def _rewound(self, facts: StreamCounts) -> ContinuityLook:
        text = (
            f"it ends at {facts.last} with {facts.added} entries that were ever added, and entries up to {self.last} were "
            "read: the server was set back (a power loss under appendfsync everysec, a copy)"
        )
        return ContinuityLook(Continuity.REWOUND, text, 0, facts.last, self.last)

    def _untold(self, facts: StreamCounts) -> ContinuityLook:
        if facts.has_anchor or facts.first == "" == self.anchor or self.last == NONE:
            return CONTINUOUS
        why = (
            "servers before 7.0 do not count entries"
            if facts.added < 0
            else "how many entries its group had read is unknown"
        )
        text = f"whether entries behind {self.last} were removed before they were read cannot be told: {why}"
        return ContinuityLook(Continuity.UNKNOWN, text, 0, self.last, facts.first)

    def to_json(self) -> dict[str, Json]:
        """For the position."""
        return {"counted": [*astuple(self)]}

    @classmethod
    def of(cls, position: Mapping[str, Json]) -> Counted:
        """What `to_json` wrote."""
        match position.get("counted"):
            case [int(read), str(last), str(anchor), str(deleted), int(withdrawn), str(exact)]:
                return cls(read, last, anchor, deleted, withdrawn, exact)
            case _:
                return cls()
