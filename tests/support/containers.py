"""Users of one embedded Postgres in containers and under several names of its folder, in an order that a seed draws."""

from __future__ import annotations

import fcntl
import random
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from stormproof.core.postgres.database import Database, connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
from support.namespaces import container
from support.processes import Child

STEPS = 14
USERS_MAX = 4

# Acquires, then does what each line of standard input says.
USER = """
import sys
from pathlib import Path
from stormproof.core.base.errors import StormproofError
from stormproof.core.postgres.database import connect
from stormproof.core.postgres.embedded import EmbeddedPostgres
server = EmbeddedPostgres(Path(sys.argv[1]))
try:
    server.acquire()
except StormproofError as error:
    print(type(error).__name__, " ".join(error.message.split()), flush=True)
    sys.exit()
print("ready", server.pid, flush=True)
for line in sys.stdin:
    word, _, number = line.strip().partition(" ")
    if word == "put":
        with connect(server.acquire(), application_name="test") as connection:
            connection.execute("create table if not exists kept (n int)")
            connection.execute("insert into kept values (%s)", (int(number),))
    elif word == "again":
        server = EmbeddedPostgres(Path(sys.argv[1]))
        server.acquire()
    elif word == "release":
        server.release()
    print(word, flush=True)
"""


def user(home: Path | str, *prefix: str) -> Child:
    """A process that acquires the server of this folder."""
    return Child([*prefix, sys.executable, "-c", USER, str(home)])


def does(child: Child, what: str) -> None:
    """Have a user do something, and wait until it is done."""
    child.say(what)
    assert child.line() == what.split(maxsplit=1)[0]


def kept(database: Database) -> list[int]:
    """What the users have put."""
    with connect(database, application_name="test") as connection:
        return [row[0] for row in connection.execute("select n from kept order by n")]


def random_containers(folder: Path, seed: int, rounds: int) -> Iterator[str]:
    """Rounds of users that come, put, leave and are killed; every row that was acknowledged is there in the end.

    Raises:
        AssertionError: one is not, a row stands twice, or a second server ran on the same data.
    """
    prepared = folder / "prepared"
    with EmbeddedPostgres(prepared) as database, connect(database, application_name="test") as connection:
        connection.execute("create table kept (n int)")
    rng = random.Random(seed)
    for number in range(1, rounds + 1):
        home = folder / f"round-{number}" / "home"
        shutil.copytree(prepared, home)
        home.with_name("link").symlink_to(home)
        with ExitStack() as stack:
            done = _Round(home, rng, stack)
            for _ in range(STEPS):
                done.step()
        with EmbeddedPostgres(home) as database:
            assert kept(database) == list(range(done.put)), f"round {number}"
        yield f"round {number}/{rounds}: {', '.join(done.said)}; {done.put} rows, exact"


@dataclass(slots=True)
class _Round:
    home: Path
    rng: random.Random
    stack: ExitStack
    users: list[Child] = field(default_factory=list[Child])
    runs: bool = False
    """Whether a server runs."""
    container: Child | None = None
    """In whose container it runs; None: in none, so that it outlives its starter."""
    contained: list[Child] = field(default_factory=list[Child])
    put: int = 0
    said: list[str] = field(default_factory=list[str])

    def step(self) -> None:
        """One thing that happens."""
        what = self.rng.choice(("come", "put", "put", "put", "leave", "kill"))
        if not self.users or (what == "come" and len(self.users) < USERS_MAX):
            self._come()
        elif what == "leave" and len(self.users) > 1:
            self._leave()
        elif what == "kill":
            self._kill()
        else:
            does(self.rng.choice(self.users), f"put {self.put}")
            self.put += 1

    def _come(self) -> None:
        name = self.home if self.rng.random() < 0.5 else self.home.with_name("link")
        contained = self.rng.random() < 0.7
        child = self.stack.enter_context(user(name, *(container() if contained else ())))
        word, pid = child.line().split(maxsplit=1)
        assert word == "ready", pid
        if not self.runs:
            self.runs, self.container = True, child if contained else None
        elif contained:
            assert pid == "None", "a second server was started on the same data"
        self.users.append(child)
        if contained:
            self.contained.append(child)
        self.said.append("a container comes" if contained else "a user comes")

    def _leave(self) -> None:
        child = self.rng.choice(self.users)
        self.users.remove(child)
        does(child, "release")
        self.said.append("one leaves")

    def _kill(self) -> None:
        child = self.rng.choice(self.users)
        self.users.remove(child)
        child.kill(signal.SIGKILL)
        self.said.append("one is killed")
        if child is not self.container:
            return
        with (self.home / "postgres/data/PG_VERSION").open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # waits for the last process of the server
        self.runs, self.container = bool(self.users), None
        for number, other in enumerate(self.users):
            does(other, "again")
            if number == 0 and other in self.contained:
                self.container = other
