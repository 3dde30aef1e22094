"""A consumer group of a stream: what is asked of the server, and what its errors mean."""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, NoReturn
from urllib.parse import parse_qs, urlsplit

from stormproof.core.dataset import DatasetName, at_server
from stormproof.core.errors import MissingRight, PositionMismatch, StoreUnavailable, UsageError
from stormproof.core.extras import required
from stormproof.core.message import storable_text

IDENTITY: Final = "stormproof-identity:"
"""Begins the name of a consumer that never reads. The group has it from its beginning, so it tells a group, and with it its
stream, from one that was made again: the server deletes it with them."""
CONSUMER: Final = "stormproof-driver:"
IDLE_CONSUMER_MS: Final = 3_600_000
"""After so long, drivers' consumers that hold nothing are removed."""
TIMEOUT_S: Final = 10.0

_READ: Final = """
local function map(flat) local t = {} for i = 1, #flat, 2 do t[flat[i]] = flat[i + 1] end return t end
local group
if redis.call('EXISTS', KEYS[1]) == 1 then
  for _, g in ipairs(redis.call('XINFO', 'GROUPS', KEYS[1])) do
    local m = map(g)
    if m['name'] == ARGV[1] then group = m end
  end
end
if not group then return {'gone'} end
local same = false
for _, c in ipairs(redis.call('XINFO', 'CONSUMERS', KEYS[1], ARGV[1])) do
  if map(c)['name'] == ARGV[4] then same = true end
end
if not same then return {'gone'} end
local stream = map(redis.call('XINFO', 'STREAM', KEYS[1]))
local read, lost = group['entries-read'], 0
if not read and group['last-delivered-id'] == '0-0' then read = 0 end
if read and stream['entries-added'] then lost = stream['entries-added'] - stream['length'] - read end
local first = stream['first-entry'] and stream['first-entry'][1] or 'nothing'
local lag = group['lag'] or -1
if lost > tonumber(ARGV[5]) then return {'lost', lost, group['last-delivered-id'], first, {}, lag} end
local found = redis.call('XREADGROUP', 'GROUP', ARGV[1], ARGV[2], 'COUNT', ARGV[3], 'STREAMS', KEYS[1], '>')
return {'read', lost, group['last-delivered-id'], first, found and found[1][2] or {}, lag}
"""
"""New entries, if the stream is the one that it was, and no more were removed before they were read than is known already:
decided in one step.

The server counts the entries that were ever added, and those that the group has read. Where more were removed than were
read, the difference was never read. Servers before 7.0 do not count; nor does a group made at an id, before it has read.
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


class Entry(NamedTuple):
    """One entry of the stream."""

    id: str
    fields: Mapping[bytes, bytes]


@dataclass(frozen=True, slots=True)
class Removed:
    """Entries that the stream lost before they were read: how many, and between which ids."""

    entries: int
    behind: str
    before: str


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
        self.left: int | None = None
        """Entries that the group was not given when it was last asked; None: the server does not tell."""
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
            "perhaps made again: which of its entries were applied cannot be told from ids. If only the group was deleted, "
            "pass on_new_stream='same': entries that were applied are known by their ids. To read the stream that is there "
            "now from its start as a new one, pass on_new_stream='adopt', or another name=",
            source=self._stream,
            group=self.name,
        )

    # ---- its identity

    def make(self, start: str, identity: str) -> str:
        """Make stream and group where they are missing, with this identity; gives the identity that the group has."""
        with self._asked():
            try:
                self._client.xgroup_create(self._stream, self.name, id=start, mkstream=True)
            except self._errors.ResponseError as error:
                if not _text(error).startswith("BUSYGROUP"):
                    raise
            found = self.identity()
            if found is None:
                self._client.xgroup_createconsumer(self._stream, self.name, IDENTITY + identity)
        return found or identity

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

    def read(self, consumer: str, limit: int, identity: str, known: int = 0) -> tuple[list[Entry], Removed | None]:
        """Entries that nobody was given. Where more than `known` were removed before they were read: none, and what was
        removed.

        Raises:
            PositionMismatch: the stream is another one.
        """
        with self._asked():
            answer = self._client.eval(
                *(_READ, 1, self._stream, self.name, consumer, limit),
                IDENTITY + identity,
                known,
            )
        if _str(answer[0]) == "gone":
            raise self.gone()
        lost, behind, before = int(answer[1]), _str(answer[2]), _str(answer[3])
        entries = [Entry(_str(id_), _fields(flat)) for id_, flat in answer[4]]
        lag = int(answer[5])
        self.left = None if lag < 0 else max(0, lag - len(entries))
        return entries, Removed(lost, behind, before) if _str(answer[0]) == "lost" else None

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

    def claim(self, consumer: str, ids: Sequence[str], idle_ms: int) -> list[Entry]:
        """Take these entries over; those that another took meanwhile are left out."""
        if not ids:
            return []
        with self._asked():
            found = self._client.xclaim(self._stream, self.name, consumer, idle_ms, list(ids))
        return [Entry(_str(id_), fields) for id_, fields in found if id_ is not None and fields is not None]

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


def _fields(flat: Sequence[bytes]) -> dict[bytes, bytes]:
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
