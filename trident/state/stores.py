"""Key-value stores under a map: what a user's own store has to do, one in memory, and the cache in front of each."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

from stormproof.core.errors import SinkRefused
from stormproof.core.forks import OneProcess


class KeyValueStore(Protocol):
    """A user's store: bytes by key. Not assumed to be transactional: a call that fails may have written some keys.

    One thread at a time calls it, and not always the same one: with several batches in flight, a batch is committed on
    another thread than the one that opened the store. It raises errors that may pass as `TransientError`
    (`StoreUnavailable`), and others as `SinkRefused`.
    """

    def multi_get(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """The values of these keys, in their order; None where there is none. Every write that returned is seen."""
        ...

    def multi_put(self, items: Mapping[bytes, bytes]) -> None:
        """Store these values; when it returns they are durable."""
        ...

    def close(self) -> None:
        """Let connections go."""
        ...


class MemoryStore:
    """A key-value store in this process's memory: for tests, and for states that need not outlive it.

    Threads: any number may use one object. Forks: a fork that writes to its parent's store is refused: it has a copy.
    """

    def __init__(self) -> None:
        self._guard = OneProcess("a MemoryStore")
        self.items: dict[bytes, bytes] = {}

    def multi_get(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """The values of these keys."""
        return [self.items.get(key) for key in keys]

    def multi_put(self, items: Mapping[bytes, bytes]) -> None:
        """Store these values."""
        with self._guard:
            self.items.update(items)

    def close(self) -> None:
        """Nothing to let go."""


OpenStore: TypeAlias = Callable[[], KeyValueStore]


class CachedStore:
    """A store, with its most recently used keys in memory. It must be the store's only writer.

    Guarantee:
        The cache never holds what the store may lack: a write enters it after the store's call has returned, and a call
        that fails empties it, since nobody knows what that call has written.
    """

    def __init__(self, store: KeyValueStore, keys_max: int) -> None:
        self._store = store
        self._keys_max = keys_max
        self._cache: OrderedDict[bytes, bytes | None] = OrderedDict()

    def multi_get(self, keys: Sequence[bytes]) -> Sequence[bytes | None]:
        """From the cache, and what it lacks from the store."""
        missing = [key for key in keys if key not in self._cache]
        if missing:
            try:
                found = self._store.multi_get(missing)
            except BaseException:
                self._cache.clear()
                raise
            if len(found) != len(missing):
                raise SinkRefused(
                    f"{type(self._store).__name__}.multi_get gave {len(found)} values for {len(missing)} keys; it must "
                    "give one for each, None where there is none"
                )
            self._cache.update(zip(missing, found, strict=True))
        values = [self._cache[key] for key in keys]
        self._used(keys)
        return values

    def multi_put(self, items: Mapping[bytes, bytes]) -> None:
        """To the store first."""
        try:
            self._store.multi_put(items)
        except BaseException:
            self._cache.clear()
            raise
        self._cache.update(items)
        self._used(items)

    def close(self) -> None:
        """Close the store."""
        self._cache.clear()
        self._store.close()

    def __len__(self) -> int:
        return len(self._cache)

    def _used(self, keys: Iterable[bytes]) -> None:
        for key in keys:
            self._cache.move_to_end(key)
        while len(self._cache) > self._keys_max:
            self._cache.popitem(last=False)
