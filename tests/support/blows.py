"""What befalls a driver: at which place, the how manieth time, and what; and the stand that deals it out.

A driver stands still (SIGSTOP) at a place while something is done to it or around it, and is woken: so everything happens
at a known instant, and nothing has to sleep.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

import psycopg

from stormproof.core.base.failpoint import ENV, ENV_LOG
from stormproof.core.postgres.database import Database
from stormproof.core.postgres.embedded import EmbeddedPostgres
from support.crashes import DRIVER_TIMEOUT_S, FENCED, KILLED, Cell, Driver, ended, resume, start, stood_still
from support.proxy import Proxy
from support.queues import put


class Action(StrEnum):
    """What happens at a place."""

    KILL = "kill"
    RAISE = "raise"
    """A transient error."""
    ERROR = "error"
    """What a bug would raise; for a task, whose job is tried again."""
    LAPSE = "lapse"
    """It stands still past its leases, nobody takes over, and it wakes."""
    TAKE_OVER = "take-over"
    """It stands still past its leases, another driver takes over and runs on, and it wakes."""
    RESTART = "restart"
    """Postgres ends in order and starts again: open transactions are rolled back, connections are gone."""
    CRASH = "crash"
    """Postgres crashes and starts again."""
    LOSE_ANSWER = "lose-answer"
    """The next COMMIT takes place, and its answer never comes."""
    LOSE_COMMIT = "lose-commit"
    """The next COMMIT never reaches the server."""
    BROKER = "broker"
    """The message server is killed and starts again."""
    CUT_ANSWER = "cut-answer"
    """The connection is cut once the message server has heard the next confirmation."""
    CUT_CONFIRM = "cut-confirm"
    """The connection is cut before the message server hears the next confirmation."""
    AGAIN = "again"
    """Messages that were put before are put again, with their ids."""

    @property
    def pauses(self) -> bool:
        """Whether the driver stands still meanwhile."""
        return self not in (Action.KILL, Action.RAISE, Action.ERROR)


@dataclass(frozen=True, slots=True)
class Blow:
    """One thing that happens to a driver, at the `at`-th time that it comes to a place."""

    point: str
    action: Action
    at: int = 1

    @property
    def armed(self) -> str:
        """As the failpoints read it."""
        return f"{self.point}={'pause' if self.action.pauses else self.action}@{self.at}"

    def __str__(self) -> str:
        return f"{self.action} at {self.point}" + (f" ({self.at})" if self.at > 1 else "")


StartDriver = Callable[[Cell, Mapping[str, str]], Driver]


@dataclass(slots=True)
class Stand:
    """Starts drivers of one topology and deals blows out to them.

    `cell.database` is what the drivers reach, which may be a proxy's; `database` is the server's own. `tally` counts what
    happened, `reached` at which places.
    """

    cell: Cell
    database: Database
    server: EmbeddedPostgres | None = None
    proxy: Proxy | None = None
    start: StartDriver = start
    timeout_s: float = DRIVER_TIMEOUT_S
    put: list[bytes] = field(default_factory=list[bytes])
    tally: Counter[str] = field(default_factory=Counter[str])
    reached: Counter[str] = field(default_factory=Counter[str])
    _numbers: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    def give(self, payloads: Sequence[bytes]) -> None:
        """Put messages."""
        put(self.database, self.cell.queue, payloads)
        self.put += payloads

    def run(self, blows: Sequence[Blow] = (), cell: Cell | None = None) -> int:
        """Run one driver until it ends; its exit status.

        Raises:
            AssertionError: it ended in a way that none of the blows explains.
        """
        cell = self.cell if cell is None else cell
        log = cell.folder / f"places-{next(self._numbers)}"
        environment = {ENV: ";".join(b.armed for b in blows), ENV_LOG: str(log)}
        child = self.start(cell, environment)
        what = ", ".join(map(str, blows)) or "nothing"
        waiting = [b for b in blows if b.action.pauses]
        fenced = False
        self.tally["starts"] += 1
        try:
            while stood_still(child, what, self.timeout_s):
                places = _places(log)
                blow = next(b for b in waiting if places[b.point] >= b.at)
                waiting.remove(blow)
                fenced |= blow.action is Action.TAKE_OVER and blow.point != "start.before_epoch"  # has no epoch yet
                self._deal(blow, cell)
                resume(child)
            code = ended(child, what, self.timeout_s)
        finally:
            child.kill()
            child.join()
            if self.proxy is not None:
                self.proxy.lose_nothing()
        self._count(blows, waiting, log, code)
        allowed = {FENCED} if fenced else {0}
        if any(b.action is Action.KILL for b in blows):
            allowed.add(KILLED)
        assert code in allowed, f"a driver ended with {code} after {what}"
        return code

    def _deal(self, blow: Blow, cell: Cell) -> None:
        self.tally[blow.action] += 1
        match blow.action:
            case Action.LAPSE:
                self.lapse()
            case Action.TAKE_OVER:
                self.lapse()
                number = next(self._numbers)
                self.give([f"o{number} common o{number}".encode()])
                self.run(cell=cell)
                # More to do, so that a driver that does not know that it is over would do it.
                self.give([f"l{number} common l{number}".encode()])
            case Action.RESTART | Action.CRASH:
                assert self.server is not None
                self.server.restart(immediate=blow.action is Action.CRASH)
            case Action.LOSE_ANSWER | Action.LOSE_COMMIT:
                assert self.proxy is not None
                self.proxy.lose_next("answer" if blow.action is Action.LOSE_ANSWER else "commit")
            case _:
                raise AssertionError(f"{blow} does not pause")

    def lapse(self) -> None:
        """Every lease runs out now: what the clock would do. Rows that a driver has in hand are left to it."""
        with psycopg.connect(self.database.conninfo) as connection:
            connection.execute(
                "update stormproof.pending_slice set expires_at = clock_timestamp() - interval '1 s' where id in"
                " (select id from stormproof.pending_slice where state = 'open' for update skip locked)"
            )

    def _count(self, blows: Sequence[Blow], undealt: Sequence[Blow], log: Path, code: int) -> None:
        places = _places(log)
        log.unlink(missing_ok=True)
        met = [b for b in blows if places[b.point] >= b.at and b not in undealt]
        self.tally[f"starts with {len(met)} at once" if len(met) > 1 else f"starts with {len(met)}"] += bool(blows)
        for blow in met:
            self.reached[blow.point] += 1
            if not blow.action.pauses and blow.action is not Action.KILL:
                self.tally[blow.action] += 1
        self.tally[Action.KILL] += code == KILLED
        self.tally["fenced"] += code == FENCED


def _places(log: Path) -> Counter[str]:
    """How often a driver has come to each place."""
    return Counter(log.read_text(encoding="ascii").split()) if log.exists() else Counter()
