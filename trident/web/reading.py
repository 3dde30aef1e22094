"""Reads the ledger for the page: on a few threads, each read in a short snapshot, one answer for all who ask at once."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, cast

import anyio
import anyio.to_thread

from stormproof.core.base.clock import Clock
from stormproof.core.base.errors import StormproofError

if TYPE_CHECKING:
    from stormproof.core.start.settings import Settings
    from stormproof.trident.decisions.stores import Stores

P = ParamSpec("P")
T = TypeVar("T")

THREADS: Final = 4
"""Reads that run at once, each on a connection of its own."""
STATEMENT_S: Final = 20
"""The server ends a statement of the page that takes longer."""
SHARED_S: Final = 1.0
"""An answer serves everybody who asks the same within so long."""
WAIT_S: Final = 1.0
"""How long a page waits for a slow answer before it is shown without."""
_KEPT: Final = 256


def open_ledger(settings: Settings) -> Stores:
    """Connect to the database that the settings name, with a pool of its own.

    Raises:
        SettingsError: no database is named, or its schema is missing or of another version.
        StoreUnavailable: it cannot be reached.
    """
    from stormproof.core.postgres.database import connect
    from stormproof.trident.decisions.stores import Stores
    from stormproof.trident.ledger.database import ledger_engine, require_schema

    database = settings.resolve_database()
    connect(
        database, application_name="stormproof"
    ).close()  # this error names the database and the setting, and no secret
    engine = ledger_engine(database, connections=THREADS, statement_timeout_s=STATEMENT_S)
    try:
        require_schema(engine, database, own=settings.uses_embedded)
    except BaseException:
        engine.dispose()
        raise
    return Stores(settings, database, engine)


@dataclass(slots=True)
class _Answer:
    lock: threading.Lock = field(default_factory=threading.Lock)
    at_s: float | None = None
    value: object = None
    error: StormproofError | None = None
    done: threading.Event = field(default_factory=threading.Event)


class LedgerReader:
    """The page's way to the ledger, for any number of requests and event loops.

    It connects when it is first asked, and again after it failed: a page that is up before its database, or outlives it,
    says so and goes on. At most `THREADS` calls run at once, the others wait.
    """

    def __init__(self, open_: Callable[[], Stores], clock: Clock, *, shared_s: float = SHARED_S) -> None:
        self._open = open_
        self._clock = clock
        self._shared_s = shared_s
        self._opened: Stores | None = None
        self._opening = threading.Lock()
        self._answers: OrderedDict[Hashable, _Answer] = OrderedDict()
        self._guard = threading.Lock()
        self._slots = threading.BoundedSemaphore(THREADS)

    def opened(self) -> Stores:
        """The database; connects if that was not done yet.

        Raises:
            StormproofError: see `open_ledger`.
        """
        with self._opening:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def close(self) -> None:
        """Close the connections. The next call connects again."""
        with self._opening:
            opened, self._opened = self._opened, None
        if opened is not None:
            opened.engine.dispose()

    async def call(self, function: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that blocks, on a thread; for what changes something, and for answers that are nobody else's."""
        return await anyio.to_thread.run_sync(self._in_slot, partial(function, *args, **kwargs))

    async def ask(self, question: Callable[[Stores], T], *, key: Hashable, for_s: float | None = None) -> T:
        """A question's answer; one answer serves all who ask with the same key within `for_s` seconds (default: a second).

        The key must tell apart whatever changes the answer, also what the asker may see. An error is shared likewise.

        Raises:
            StormproofError: whatever the question raises.
        """
        keeps_s = self._shared_s if for_s is None else for_s
        return cast("T", await anyio.to_thread.run_sync(self._shared, question, key, keeps_s))

    async def latest(self, question: Callable[[Stores], T], *, key: Hashable, every_s: float) -> T | None:
        """A slow question's newest answer, which is at most so old, or being asked anew meanwhile.

        Nobody waits for it longer than `WAIT_S`; None: there is no answer yet, or the last one was an error.
        """
        return cast("T | None", await anyio.to_thread.run_sync(self._latest, question, key, every_s))

    def _latest(self, question: Callable[[Stores], Any], key: Hashable, every_s: float) -> Any:
        answer = self._answer(key)
        now = self._clock.monotonic_s()
        if (answer.at_s is None or now - answer.at_s >= every_s) and answer.lock.acquire(blocking=False):
            answer.done.clear()

            def run() -> None:
                try:
                    answer.value = question(self.opened())
                except StormproofError:
                    answer.value = None
                finally:
                    answer.at_s = self._clock.monotonic_s()
                    answer.done.set()
                    answer.lock.release()

            threading.Thread(target=run, name="stormproof web: a slow question", daemon=True).start()
        answer.done.wait(WAIT_S if answer.at_s is None else 0.0)
        return answer.value

    def _in_slot(self, function: Callable[[], T]) -> T:
        with self._slots:
            return function()

    def _shared(self, question: Callable[[Stores], Any], key: Hashable, keeps_s: float) -> Any:
        answer = self._answer(key)
        with answer.lock:
            now = self._clock.monotonic_s()
            if answer.at_s is None or now - answer.at_s >= keeps_s:
                answer.value, answer.error = None, None
                try:
                    answer.value = self._in_slot(lambda: question(self.opened()))
                except StormproofError as error:
                    answer.error = error
                answer.at_s = self._clock.monotonic_s()
            if answer.error is not None:
                raise answer.error.with_traceback(None)
            return answer.value

    def _answer(self, key: Hashable) -> _Answer:
        with self._guard:
            found = self._answers.setdefault(key, _Answer())
            self._answers.move_to_end(key)
            while len(self._answers) > _KEPT:
                self._answers.popitem(last=False)
            return found
