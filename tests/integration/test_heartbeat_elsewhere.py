"""Executors whose heartbeat needs no shared folder: a message that kills its worker is found, and silence blames nobody."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Final

import pytest
import sqlalchemy as sa
from support.queues import prepared_database, put

from stormproof.core.postgres.database import Database, connect
from stormproof.trident.ledger import tables as t
from stormproof.trident.terms.transaction_states import EventKind

pytestmark = [
    pytest.mark.spark(own=True),
    pytest.mark.postgres,
    pytest.mark.timeout(540),
    pytest.mark.sampled(0.3, pool="long"),
]

POISON: Final = "poison"
CUT: Final = "cut"
CUTS: Final = 2
"""A message that is alone in its batch is dead-lettered when its job has died so often."""

DRIVER: Final = """
import gc, json, logging, os, socket, struct, sys, threading
from pathlib import Path
from stormproof import PostgresQueue, PostgresSink, Topology, count

FOLDER, TAKEN_FOR = Path(sys.argv[1]), sys.argv[2]
SEEN, CUTS = FOLDER / "seen", {cuts}

def cut_off():
    \"\"\"Lose the connection to the driver, and stand still: as a machine whose cable is pulled looks from there.\"\"\"
    from stormproof.core.heartbeat.task import DriverConnection
    def refused(self):
        raise ConnectionRefusedError("the cable is out")
    DriverConnection._connected = refused
    for one in gc.get_objects():
        if isinstance(one, DriverConnection):
            with one._lock:
                one._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                one._drop()
    threading.Event().wait()

def split(line):
    folders = [path.name for path in (FOLDER / "home" / "staging" / "heartbeat").rglob("*") if path.is_file()]
    if set(folders) - {{"notes"}}:
        raise AssertionError(f"a task reports to a folder: {{folders}}")
    if line == "{poison}":
        os._exit(13)
    if line == "{cut}" and (SEEN.read_text() if SEEN.exists() else "").count("x") < CUTS:
        with SEEN.open("a") as file:
            file.write("x")
        cut_off()
    return line.split()

if __name__ == "__main__":
    if TAKEN_FOR == "a hang":
        from stormproof.core.heartbeat.listener import JobSigns
        state = JobSigns._state
        JobSigns._state = lambda self, task, now_s: (state(self, task, now_s)[0], False)
    logging.getLogger("stormproof").setLevel(logging.CRITICAL)
    topology = Topology("words")
    words = topology.stream("lines", PostgresQueue("words", max_attempts=1)).flat_map(split, "line", schema="word string")
    words.group_by("word").persistent_aggregate(n=count()).into(PostgresSink("counts"))
    statistics = topology.run(until_idle=True)
    print(json.dumps([statistics.batches, statistics.messages, statistics.dead_letters]))
"""


def run(database: Database, folder: Path, lines: list[str], silence_is: str = "silence") -> list[int]:
    """Batches, messages and dead letters of a run over these lines, on executors that are processes of their own."""
    prepared_database(database)
    put(database, "words", [line.encode() for line in lines])
    script = folder / "job.py"
    script.write_text(DRIVER.format(poison=POISON, cut=CUT, cuts=CUTS))
    environment = {
        "STORMPROOF_DATABASE_URL": database.sqlalchemy_url.render_as_string(hide_password=False),
        "STORMPROOF_HOME": str(folder / "home"),
        "STORMPROOF_MASTER": "local-cluster[1,2,900]",
        "STORMPROOF_SPARK": json.dumps(
            {"spark.executor.memory": "800m", "spark.log.level": "OFF", "spark.task.maxFailures": "2"}
        ),
        "STORMPROOF_MESSAGE_TIMEOUT_S": "5",
    }
    command = [sys.executable, str(script), str(folder), silence_is]
    done = subprocess.run(
        command, env={**os.environ, **environment}, cwd=folder, capture_output=True, text=True, timeout=480, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    figures: list[int] = json.loads(done.stdout)
    return figures


def blamed(database: Database) -> Counter[str]:
    """The inputs that failed, or were returned or replayed, as the ledger's events name them."""
    kinds = [k.value for k in (EventKind.FAILURE, EventKind.RETURNED, EventKind.REPLAY, EventKind.DEAD_LETTER)]
    engine = sa.create_engine(database.sqlalchemy_url)
    with engine.connect() as connection:
        rows = connection.execute(sa.select(t.event.c.message).where(t.event.c.kind.in_(kinds))).all()
    engine.dispose()
    return Counter(row.message for row in rows)


def counts(database: Database) -> Counter[str]:
    with connect(database, application_name="tests", autocommit=True) as connection:
        return Counter(dict(connection.execute("select word, n from counts").fetchall()))


def test_a_message_that_kills_its_worker_is_found_and_its_neighbours_are_not_blamed(
    database: Database, tmp_path: Path
) -> None:
    lines = [f"m{number} common" for number in range(16)]
    batches, messages, dead_letters = run(database, tmp_path, [*lines[:10], POISON, *lines[10:]])
    assert counts(database) == Counter(word for line in lines for word in line.split())
    assert (messages, dead_letters) == (len(lines), 1)
    assert len(blamed(database)) == 1
    assert batches <= 6, "by halves it would be up to 1 + 2 * log2(16) = 9"


@pytest.mark.parametrize(("silence_is", "dead"), [("silence", 0), ("a hang", 1)])
def test_a_task_that_is_not_heard_of_blames_no_message(
    database: Database, tmp_path: Path, silence_is: str, dead: int
) -> None:
    """The second case is the control: where silence is taken for a hang, an innocent message becomes a dead letter."""
    _, _, dead_letters = run(database, tmp_path, [CUT], silence_is)
    assert (tmp_path / "seen").read_text() == "x" * CUTS
    assert dead_letters == dead
    assert sum(blamed(database).values()) == 2 * dead
    assert counts(database) == Counter({CUT: 1} if not dead else {})
