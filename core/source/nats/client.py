"""A durable pull consumer of a stream: what is asked of the server, and what its errors mean.

The client is asynchronous: it runs in a thread of its own, where it also tells the server now and then that what was
pulled is still in work.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import os
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar, Final, NamedTuple, TypeVar

import pyarrow as pa

from stormproof.core.base.errors import MissingRight, PositionMismatch, StoreUnavailable, UsageError
from stormproof.core.base.extras import required
from stormproof.core.base.message import storable_text
from stormproof.core.source.metadata import Fact, Metadata

TIMEOUT_S: Final = 10.0
"""For each answer of the server."""
PULLED_MAX: Final = 10_000
"""Messages asked for at once: they wait in the client's memory."""
IN_WORK: Final = b"+WPI"
DONE: Final = b"+ACK"
AGAIN: Final = b"-NAK"

_NO_MESSAGES: Final = ("404", "408")
_GONE_CODES: Final = (10014, 10059)  # no such consumer, no such stream
_NO_MESSAGE: Final = 10037
_UNBOUNDED: Final = 2**62

T = TypeVar("T")


class Pulled(NamedTuple):
    """A message as it was pulled. `stored_us`: when the stream took it; `delivered`: how many times it came. `reply` is the
    subject on which the server waits for its confirmation; `message` is the client's.
    """

    sequence: int
    stored_us: int
    delivered: int
    reply: str
    payload: bytes
    message: Any


@dataclass(frozen=True, slots=True)
class StreamFacts:
    """Which stream it is (when it was made), and which messages it has. `holes`: between them, so many are gone.
    `keeps`: whether a message stays once it is confirmed.
    """

    created: str
    first: int
    last: int
    holes: int
    keeps: bool


ANEW: Final = (
    "To go on in it, with what was not received yet, pass on_new_stream='same'; to read all that is there now as new, pass "
    "on_new_stream='adopt', or give the topology another name"
)


class _Status(NamedTuple):
    """What the server says in a message's place: that there are no more, or why it gives none."""

    code: str
    text: str


class _Inbox:
    """What the server sends to one subject, taken by the batch: a wait for each message would cost more than the message."""

    def __init__(self, subject: str = "") -> None:
        self.subject = subject
        self._messages: list[Any] = []
        self._status: _Status | None = None
        self._wanted = 0
        self._is_full = asyncio.Event()

    async def put(self, message: Any) -> None:
        """Called by the client for each message."""
        status = (message.headers or {}).get("Status") if not message.data and not message.reply else None
        if status is None:
            self._messages.append(message)
        else:
            self._status = _Status(status, message.headers.get("Description", ""))
        if self._status is not None or len(self._messages) >= self._wanted:
            self._is_full.set()

    async def take(self, limit: int) -> tuple[list[Any], _Status | None]:
        """So many messages, or fewer and what the server says of the rest.

        Raises:
            TimeoutError: for some time, nothing came.
        """
        self._wanted = limit
        while self._status is None and len(self._messages) < limit:
            before = len(self._messages)
            self._is_full.clear()
            try:
                await asyncio.wait_for(self._is_full.wait(), TIMEOUT_S)
            except TimeoutError:
                if len(self._messages) == before:
                    raise
        taken, self._messages = self._messages[:limit], self._messages[limit:]
        status, self._status = self._status, None
        return taken, status


class NatsConsumer:
    """One durable consumer of one stream, over a connection of its own. Every call may raise `StoreUnavailable`."""

    def __init__(
        self, url: str, stream: str, name: str, where: str, ack_wait_s: float, options: Mapping[str, Any]
    ) -> None:
        self._nats = required("nats", "nats", where)
        self._url = url
        self._stream = stream
        self.name = name
        self._where = where
        self._ack_wait_s = ack_wait_s
        self._options = dict(options)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._pid = 0
        self._connection: Any = None
        self._inbox = _Inbox()
        self._closed: asyncio.Future[None] | None = None
        self._held: dict[str, None] = {}
        self.connections = 0
        """Connections that were made; only behind a new one may the server be another, or have been set back."""
        self.left: int | None = None
        """Messages that the consumer had not delivered when it was last asked; None: it was not asked yet."""

    # ---- the thread

    def _ask(self, what: Coroutine[Any, Any, T]) -> T:
        """Run it in the thread, and say what its errors mean."""
        from nats import errors
        from nats.js import errors as js_errors

        if self._loop is None or self._pid != os.getpid():  # a fork has no such thread
            self._connection, self._pid, self._held = None, os.getpid(), {}
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=_run, args=(self._loop,), name="stormproof-nats", daemon=True)
            self._thread.start()
        waits = asyncio.run_coroutine_threadsafe(what, self._loop)
        try:
            return waits.result(3 * TIMEOUT_S)
        except js_errors.NotFoundError as error:
            if error.err_code in _GONE_CODES:
                raise self.gone() from error
            raise self._away(error) from error
        except js_errors.BadRequestError as error:
            raise UsageError(f"{self._where}: the server refuses it: {_text(error)}", source=self._stream) from error
        except concurrent.futures.TimeoutError as error:
            waits.cancel()
            raise self._away(error) from error
        except (TimeoutError, errors.Error, OSError) as error:
            self.close()
            text = str(error).lower()
            if "invalid connect url" in text:  # its cause may show the password
                raise UsageError(
                    f"{self._where}: the url cannot be read; write nats://HOST:PORT, nats://USER:PASSWORD@HOST:PORT or "
                    "nats://TOKEN@HOST:PORT, with %40 for @ and %2F for /",
                    source=self._stream,
                ) from None
            if isinstance(error, errors.InvalidUserCredentialsError) or "authorization" in text:
                raise MissingRight(
                    f"{self._where}: the server refuses the user; give url or connect= the right credentials, and let the "
                    f"user publish to $JS.API.> and $JS.ACK.{self._stream}.>, and subscribe to _INBOX.>",
                    source=self._stream,
                ) from error
            raise self._away(error) from error

    def _away(self, error: Exception) -> StoreUnavailable:
        """It was not answered: the next call makes another connection, since an answer may still come on this one."""
        self.close()
        return StoreUnavailable(f"{self._where}: {_text(error)}", source=self._stream)

    def gone(self) -> PositionMismatch:
        """The stream, or its consumer, is another one than the position was taken from."""
        return PositionMismatch(
            f"{self._where}: the stream or its consumer {self.name} was deleted since it was first read, and perhaps made "
            f"again. {ANEW}",
            source=self._stream,
            consumer=self.name,
        )

    async def _connected(self) -> Any:
        if self._connection is None or self._connection.is_closed:
            connection = self._nats.NATS()
            try:
                await connection.connect(
                    self._url,
                    **{
                        "allow_reconnect": False,  # what was asked before would be forgotten
                        "max_reconnect_attempts": 1,  # else a server that is away is tried for minutes
                        "reconnect_time_wait": 0.1,
                        "connect_timeout": TIMEOUT_S,
                        "error_cb": _quiet,
                        "name": "stormproof",
                        **self._options,
                        "closed_cb": self._lost,
                    },
                )
            except self._nats.errors.Error as error:
                if "invalid connect url" not in str(error):  # it was never opened
                    await connection.close()  # a socket on which the server refused the user is left open
                raise
            self._connection = connection
            self.connections += 1
            self._closed = asyncio.get_running_loop().create_future()
            self._inbox = _Inbox(self._connection.new_inbox())
            await self._connection.subscribe(
                self._inbox.subject,
                cb=self._inbox.put,
                pending_msgs_limit=_UNBOUNDED,
                pending_bytes_limit=_UNBOUNDED,
            )
            asyncio.get_running_loop().create_task(self._keep(self._connection))
        return self._connection

    async def _lost(self) -> None:
        if self._closed is not None and not self._closed.done():
            self._closed.set_result(None)

    async def _unless_lost(self, what: Coroutine[Any, Any, T]) -> T:
        """An answer of the server; the client would wait for one on a connection that is gone, too."""
        assert self._closed is not None
        asked: asyncio.Future[Any] = asyncio.ensure_future(what)
        await asyncio.wait((asked, self._closed), return_when=asyncio.FIRST_COMPLETED)
        if not asked.done():
            asked.cancel()
            raise self._nats.errors.ConnectionClosedError
        answer: T = await asked
        return answer

    async def _keep(self, connection: Any) -> None:
        """Tell the server that what is held is in work, for as long as the connection lives."""
        while not connection.is_closed:
            await asyncio.sleep(self._ack_wait_s / 3)
            for number, reply in enumerate(list(self._held)):
                if connection.is_closed:
                    return
                await connection.publish(reply, IN_WORK)
                if number % 1_000 == 999:
                    await asyncio.sleep(0)

    # ---- stream and consumer

    def stream(self) -> StreamFacts:
        """What is there."""
        return self._ask(self._stream_facts())

    async def _stream_facts(self) -> StreamFacts:
        info = await self._requested(f"$JS.API.STREAM.INFO.{self._stream}", {})
        state, keeps = info["state"], info["config"].get("retention", "limits") == "limits"
        return StreamFacts(info["created"], state["first_seq"], state["last_seq"], state.get("num_deleted", 0), keeps)

    def gone_between(self, behind: int, upto: int) -> tuple[int, list[int]]:
        """The stream's first sequence, and those behind it that are gone of (`behind`, `upto`]."""
        body = {"deleted_details": True}
        state = self._ask(self._requested(f"$JS.API.STREAM.INFO.{self._stream}", body))["state"]
        first = int(state["first_seq"])
        return first, [one for one in state.get("deleted") or () if max(behind, first - 1) < one <= upto]

    def stored_us(self, sequence: int) -> int | None:
        """When the stream took this message; None: it does not have it."""
        from nats.js.errors import NotFoundError

        async def stored() -> int | None:
            try:
                found = await self._requested(f"$JS.API.STREAM.MSG.GET.{self._stream}", {"seq": sequence})
            except NotFoundError as error:
                if error.err_code != _NO_MESSAGE:
                    raise
                return None
            return us_of(found["message"]["time"])

        return self._ask(stored())

    def holds_all(self) -> bool:
        """Whether every message that the consumer has delivered and not heard of is held here."""
        subject = f"$JS.API.CONSUMER.INFO.{self._stream}.{self.name}"
        return int(self._ask(self._requested(subject, {}))["num_ack_pending"]) <= len(self._held)

    async def _requested(self, subject: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return await self._request(await self._connected(), subject, body)

    async def _request(self, connection: Any, subject: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """A request of JetStream's own interface; its text has what the client's own class leaves out."""
        from nats.js import errors as js_errors

        answer = await self._unless_lost(connection.request(subject, json.dumps(body).encode(), timeout=TIMEOUT_S))
        found: dict[str, Any] = json.loads(answer.data)
        if "error" in found:
            js_errors.APIError.from_error(found["error"])  # raises
        return found

    def make(self, start: str | datetime, subject: str | None, *, anew: bool = False) -> None:
        """Make the consumer where it is missing; `anew`: also where it is there. It begins at `start`: "earliest", "latest",
        or a time.

        Raises:
            UsageError: one is there that would lose messages, or reads others.
        """
        self._ask(self._make(start, subject, anew))

    async def _make(self, start: str | datetime, subject: str | None, anew: bool) -> None:
        from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy
        from nats.js.errors import NotFoundError

        jetstream = (await self._connected()).jetstream(timeout=TIMEOUT_S)
        policies = {"earliest": DeliverPolicy.ALL, "latest": DeliverPolicy.NEW}
        try:
            found = (await jetstream.consumer_info(self._stream, self.name)).config
            if anew:
                await jetstream.delete_consumer(self._stream, self.name)
                await self._make(start, subject, anew=False)
                return
        except NotFoundError as error:
            if error.err_code != _GONE_CODES[0]:
                raise
            found = ConsumerConfig(
                durable_name=self.name,
                description="a topology of Stormproof",
                deliver_policy=policies[start] if isinstance(start, str) else DeliverPolicy.BY_START_TIME,
                opt_start_time=None if isinstance(start, str) else start,
                ack_policy=AckPolicy.EXPLICIT,
                ack_wait=self._ack_wait_s,
                max_deliver=-1,
                max_ack_pending=-1,
                filter_subject=subject,
            )
            await jetstream.add_consumer(self._stream, found)
        for wrong, what, instead in (
            (found.deliver_subject is not None, "pushes messages", "a pull consumer"),
            (found.ack_policy != AckPolicy.EXPLICIT, "does not wait for confirmations", "ack policy 'explicit'"),
            ((found.max_deliver or -1) > 0, "gives messages up after some deliveries", "max_deliver -1"),
            ((found.filter_subject or None) != subject, "reads other subjects", f"filter subject {subject or 'none'}"),
        ):
            if wrong:
                raise UsageError(
                    f"{self._where}: the consumer {self.name} {what}; it needs {instead}. Edit it, or name another one "
                    "by consumer=",
                    consumer=self.name,
                )

    def is_there(self) -> bool:
        """Whether the consumer is there."""
        return self._ask(self._is_there())

    async def _is_there(self) -> bool:
        from nats.js.errors import NotFoundError

        try:
            await (await self._connected()).jetstream(timeout=TIMEOUT_S).consumer_info(self._stream, self.name)
        except NotFoundError as error:
            if error.err_code not in _GONE_CODES:
                raise
            return False
        return True

    # ---- its messages

    def pull(self, limit: int) -> tuple[list[Pulled], StreamFacts, bool]:
        """What there is now, without waiting for more; the stream as it was after that; and whether that was all.

        Raises:
            PositionMismatch: the consumer is gone.
        """
        return self._ask(self._pull(min(limit, PULLED_MAX)))

    async def _pull(self, limit: int) -> tuple[list[Pulled], StreamFacts, bool]:
        connection = await self._connected()
        body = json.dumps({"batch": limit, "no_wait": True}).encode()
        subject = f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self.name}"
        await connection.publish(subject, body, self._inbox.subject)
        messages, status = await self._unless_lost(self._inbox.take(limit))
        pulled: list[Pulled] = []
        for message in messages:
            delivered, sequence, stored, self.left = said_in(message.reply)
            pulled.append(Pulled(sequence, stored, delivered, message.reply, message.data, message))
        if status is not None and status.code in _NO_MESSAGES:
            self.left = 0
        elif status is not None:
            if not await self._is_there():
                raise self.gone()
            raise self._nats.errors.Error(f"the server answers a pull with: {status.code} {status.text}")
        self._held.update(dict.fromkeys(one.reply for one in pulled))
        return pulled, await self._stream_facts(), status is not None

    def answer(self, replies: Sequence[str], how: bytes) -> None:
        """Confirm these deliveries, or give them back; returns once the server has read it."""
        for reply in replies:
            self._held.pop(reply, None)
        self._ask(self._answer(replies, how))

    async def _answer(self, replies: Iterable[str], how: bytes) -> None:
        connection = await self._connected()
        for reply in replies:
            await connection.publish(reply, how)
        await self._unless_lost(connection.flush(timeout=int(TIMEOUT_S)))

    def close(self) -> None:
        """Let the connection and its thread go; the next call makes others. What was pulled comes again."""
        self._held.clear()
        loop, connection, self._loop, self._connection = self._loop, self._connection, None, None
        if loop is None or self._pid != os.getpid():
            return
        asyncio.run_coroutine_threadsafe(_end(loop, connection), loop)
        if self._thread is not None:
            self._thread.join(TIMEOUT_S)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    try:
        loop.run_forever()
        left = asyncio.all_tasks(loop)
        for task in left:
            task.cancel()
        if left:
            loop.run_until_complete(asyncio.wait(left))
    finally:
        loop.close()


async def _end(loop: asyncio.AbstractEventLoop, connection: Any) -> None:
    try:
        if connection is not None:
            await asyncio.wait_for(connection.close(), TIMEOUT_S)
    except (TimeoutError, OSError):  # it is gone already
        pass
    finally:
        loop.stop()


async def _quiet(error: Exception) -> None:
    """What goes wrong in the background is seen by the next call."""


def _text(error: BaseException) -> str:
    return storable_text(str(error) or type(error).__name__, 500)


# ---- what a server knows of a message beside its payload

_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_TOKENS: Final = 9
"""Parts of a confirmation's subject; a server with domains has more."""


def said_in(reply: str) -> tuple[int, int, int, int]:
    """What the subject of a confirmation says: how often the message was delivered, its sequence in the stream, when the
    stream took it (microseconds since 1970), and how many are left. The client's own time has been through a float.
    """
    tokens = reply.split(".")
    first = 4 if len(tokens) == _TOKENS else 6
    delivered, sequence, _, stored_ns, left = tokens[first : first + 5]
    return int(delivered), int(sequence), int(stored_ns) // 1_000, int(left)


def time_of(us: int) -> datetime:
    """Microseconds since 1970 as a time."""
    return _EPOCH + timedelta(microseconds=us)


def us_of(text: str) -> int:
    """A time of the server's as microseconds since 1970."""
    return (datetime.fromisoformat(text) - _EPOCH) // timedelta(microseconds=1)


def _headers(one: Any) -> Sequence[dict[str, str]]:
    headers = one.message.headers
    return [{"name": name, "value": value} for name, value in headers.items()] if headers else ()


class NatsMetadata(Metadata):
    """`timestamp` is when the stream took the message; `delivered` how often it was delivered, this time included."""

    __slots__ = ()
    KNOWN: ClassVar[Mapping[str, Fact]] = {
        "subject": (pa.string(), lambda one: one.message.subject),
        "sequence": (pa.int64(), lambda one: one.sequence),
        "timestamp": (pa.timestamp("us", "UTC"), lambda one: one.stored_us),
        "headers": (
            pa.list_(pa.struct([pa.field("name", pa.string()), pa.field("value", pa.string())])),
            _headers,
        ),
        "delivered": (pa.int64(), lambda one: one.delivered),
    }
