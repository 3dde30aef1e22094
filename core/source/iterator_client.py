"""The client of an `IteratorSource`: the iterator that gives messages, and the callbacks that are told of them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeAlias, cast

from stormproof.core.base.arguments import require_function, shown
from stormproof.core.base.errors import FatalError, StoreUnavailable, UsageError
from stormproof.core.base.message import storable_text
from stormproof.core.base.process import kept_from_forks
from stormproof.core.user_code.functions import refuse_unfit_call

Payload: TypeAlias = bytes | str
Item: TypeAlias = Payload | tuple[Hashable, Payload] | None
"""What an iterator gives: a payload, a pair of the client's own id and a payload, or None where nothing has arrived."""


class Received(NamedTuple):
    """A message from the iterator. `key` is the client's own id; None: it gave none, or switched tracking off."""

    key: Hashable
    payload: bytes
    is_tracked: bool


class IteratorClient:
    """A user's client. It knows an unresolved message by the client's own id, and by the number that the source gave it.

    `confirm` is called with each id that is owed until a call returns.

    Raises:
        UsageError: an argument is not what it must be.
    """

    def __init__(
        self,
        source: str,
        items: Iterable[Item] | Callable[[], Iterable[Item]],
        confirm: Callable[[Sequence[Hashable]], object] | None,
        abort: Callable[[Sequence[Hashable]], object] | None,
    ) -> None:
        where = f"source {source}"
        if callable(items):
            refuse_unfit_call(
                source, f"{where}: items", items, (), "write one without parameters, which makes an iterable"
            )
        elif isinstance(items, (str, bytes)) or not isinstance(items, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise UsageError(
                f"{where}: items is {shown(items)}; it must be an iterable of payloads, or a function that makes one"
            )
        for argument, function in (("confirm", confirm), ("abort", abort)):
            if function is not None:
                require_function(where, argument, function, f"{argument}(ids)")
                refuse_unfit_call(source, f"{where}: {argument}", function, ("ids",), "write one of a list of ids")
        self._source = source
        self._factory: Callable[[], Iterable[Item]] | None = items if callable(items) else None
        self._items: Iterator[Item] | None = None if callable(items) else iter(items)
        self._on_confirm = confirm
        self._on_abort = abort
        self._keys: dict[int, Hashable] = {}
        self._numbers: dict[Hashable, int] = {}
        self._owed: list[Hashable] = []
        self._broken: str | None = None

    @property
    def hears_confirms(self) -> bool:
        """Whether it has a `confirm`."""
        return self._on_confirm is not None

    # ---- what it gives

    def receive(self) -> Received | None:
        """The next message; None where nothing has arrived, or the iterator is at its end.

        Raises:
            StoreUnavailable: the iterator raised, and the next call asks its function for a new one.
            FatalError: the iterator raised, and there is no function that makes a new one.
            UsageError: it gave an item of another form.
        """
        with kept_from_forks():
            item = self._next_item()
        return None if item is None else self._checked(item)

    def _next_item(self) -> Item:
        if self._broken is not None:
            raise FatalError(self._broken, source=self._source)
        try:
            if self._items is None:
                if self._factory is None:
                    return None
                self._items = iter(self._factory())
            return next(self._items)
        except StopIteration:
            self._items, self._factory = None, None
            return None
        except Exception as error:  # whatever the user's client raises, as the cause
            text = f"source {self._source}: its iterator raised {type(error).__name__}: {storable_text(error)}"
            # A generator that raised is at its end: asked again, it would seem to have no more messages.
            self._items = None
            if self._factory is not None:
                raise StoreUnavailable(f"{text}; a new one is made", source=self._source) from error
            self._broken = f"{text}; give the source a function that makes an iterator, and a new one is made instead"
            raise FatalError(self._broken, source=self._source) from error

    def _checked(self, item: object) -> Received:
        key: object = None
        payload, is_pair = item, isinstance(item, tuple)
        if is_pair:
            parts = cast("tuple[object, ...]", item)
            if len(parts) != 2:
                raise UsageError(
                    f"source {self._source}: its iterator gave a tuple of {len(parts)}; (id, payload) is wanted"
                )
            key, payload = parts
        if isinstance(payload, str):
            payload = payload.encode()
        if not isinstance(payload, bytes):
            raise UsageError(
                f"source {self._source}: its iterator gave a payload of type {type(payload).__name__}; bytes or str is "
                "wanted"
            )
        if not isinstance(key, Hashable):
            raise UsageError(
                f"source {self._source}: its iterator gave an id of type {type(key).__name__}; ids must be hashable"
            )
        return Received(key, payload, not is_pair or key is not None)

    # ---- what it is told

    def keep(self, number: int, key: Hashable) -> None:
        """Know an unresolved message by this number and by the client's id, if it has one."""
        if key is not None:
            self._keys[number], self._numbers[key] = key, number

    def has(self, key: Hashable) -> bool:
        """Whether the message with this id is unresolved."""
        return key is not None and key in self._numbers

    def owe(self, number: int) -> None:
        """The message with this number is resolved: the client is owed its confirmation."""
        if number in self._keys:
            key = self._keys.pop(number)
            del self._numbers[key]
            self._owed.append(key)

    def pay(self) -> None:
        """Confirm what is owed; where the client raises, it is still owed.

        Raises:
            StoreUnavailable: the client's `confirm` raised.
        """
        if self._owed and self._on_confirm is not None:
            try:
                self._on_confirm(tuple(self._owed))
            except Exception as error:  # whatever the user's client raises, as the cause
                raise StoreUnavailable(
                    f"source {self._source}: confirm={getattr(self._on_confirm, '__name__', 'callback')} raised "
                    f"{type(error).__name__}: {storable_text(error)}; {len(self._owed)} messages are owed a confirmation",
                    source=self._source,
                ) from error
        self._owed.clear()

    def give_back(self) -> None:
        """Call the client's `abort` with the ids of everything that is unresolved."""
        if self._on_abort is not None and self._keys:
            self._on_abort(list(self._keys.values()))
        self._keys.clear()
        self._numbers.clear()
