"""Topologies over tables in an object store: a misfortune at every failpoint, and requests and answers that are lost."""

from __future__ import annotations

import json
import random
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psycopg
import pytest
from support.blows import Action
from support.brokers.object_store import ObjectStore
from support.chain import one_way_each, shuffled
from support.command_line import CommandLine
from support.crashes import FAILED, UNAVAILABLE, Cell, run_driver
from support.lossy_store import Loss, LossyStore
from support.object_tables import (
    APPEND,
    FOLD,
    IN_OBJECT_STORE,
    SINKS,
    build,
    contents,
    cut_a_file,
    give_store,
    lose_a_file,
    lose_a_file_unseen,
    opener,
)
from support.queues import prepared_database, put
from support.rounds import lives
from support.sabotage import no_transaction_identifier
from support.topologies import expected, messages
from support.verdicts import require_verified

from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database
from stormproof.core.postgres.embedded import EmbeddedPostgres
from stormproof.sinks.delta.session import DeltaSession

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(600)]

WAYS = [Action.KILL, Action.RAISE, Action.LAPSE, Action.TAKE_OVER]
ORDEALS_PER_END = 4


CELLS = 4
"""Of some sixty; `make torture` has all."""


@pytest.mark.parametrize("in_flight", [1, 4])
def test_a_misfortune_at_every_failpoint(
    postgres: EmbeddedPostgres, object_store: ObjectStore, in_flight: int, seed: int, pytestconfig: pytest.Config
) -> None:
    """Half of them, by the seed, with one batch in flight, and the other half with four."""
    cells = shuffled(one_way_each(WAYS, seed, shape=IN_OBJECT_STORE), random.Random(seed))
    tally: Counter[str] = Counter()

    def changed(cell: Cell) -> Cell:
        give_store(cell, object_store, uuid.uuid4().hex)
        return replace(cell, in_flight=in_flight, batch_messages=5 if in_flight == 1 else 3)

    chosen = cells[0 if in_flight == 1 else 1 :: 2][: None if pytestconfig.getoption("all") else CELLS]
    for line in lives(postgres, chosen, tally, changed, IN_OBJECT_STORE, ordeals_per_end=ORDEALS_PER_END):
        print(line)
    print(tally)


LOST = 0.2
"""The share of PUTs that a bad network loses, or whose answers it loses."""


def test_a_misfortune_at_every_failpoint_on_a_bad_network(
    postgres: EmbeddedPostgres, object_store: ObjectStore, seed: int, pytestconfig: pytest.Config
) -> None:
    """As above, while requests and answers are lost all the time."""
    rng = random.Random(seed)
    cells = shuffled(one_way_each(WAYS, seed, shape=IN_OBJECT_STORE), rng)
    tally: Counter[str] = Counter()
    with LossyStore(object_store.port) as proxy:
        proxy.lose_some(rng, LOST)

        def changed(cell: Cell) -> Cell:
            give_store(cell, object_store, uuid.uuid4().hex, proxy.port)
            return replace(cell, batch_messages=5)

        chosen = cells if pytestconfig.getoption("all") else cells[:CELLS]
        for line in lives(postgres, chosen, tally, changed, IN_OBJECT_STORE, ordeals_per_end=ORDEALS_PER_END):
            print(line)
        print(tally, f"{proxy.lost} requests or answers lost")
        assert proxy.lost > 0


LOG_ENTRY = r"_delta_log/0{10}"
PREPARED = r"stormproof-[^/]*\.parquet"


@dataclass(slots=True)
class Stand:
    """A topology whose drivers reach the store through the proxy, and messages that are put into its queue."""

    cell: Cell
    store: ObjectStore
    proxy: LossyStore
    put: list[bytes] = field(default_factory=list[bytes])

    def give(self, number: int, prefix: str) -> None:
        payloads = messages(number, prefix)
        put(self.cell.database, self.cell.queue, payloads)
        self.put += payloads

    def late_statuses(self) -> list[int]:
        """What the store answered to requests that were held back, by the first line of each answer."""
        return [int(answer.split()[1]) for answer in self.proxy.late_answers]

    def require_exact(self) -> None:
        """Both tables hold what the input alone says, and the audit says so, too."""
        for sink, found in contents(self.cell, self.cell.database).items():
            assert found == expected(self.put), sink
        require_verified(self.cell, opener=opener(self.cell, self.cell.database))


@pytest.fixture
def stand(database: Database, object_store: ObjectStore, tmp_path: Path) -> Iterator[Stand]:
    with LossyStore(object_store.port) as proxy:
        cell = Cell("lossy", None, Guarantee.EXACTLY_ONCE, tmp_path, prepared_database(database), "q", build=build)
        give_store(cell, object_store, uuid.uuid4().hex, proxy.port)
        found = Stand(cell, object_store, proxy)
        found.give(6, "first")
        assert run_driver(cell) == 0
        yield found


@pytest.mark.parametrize("loss", [Loss.ANSWER, Loss.REQUEST])
@pytest.mark.parametrize("sink", SINKS)
@pytest.mark.parametrize("path", [LOG_ENTRY, PREPARED, r"part-[^/]*\.parquet"])
def test_a_put_whose_request_or_answer_is_lost_is_applied_once(stand: Stand, sink: str, path: str, loss: Loss) -> None:
    """Of a log entry, a prepared file, and a file of a MERGE: the client repeats it, or the log is asked."""
    if sink == APPEND and path.startswith("part-"):
        pytest.skip("an append writes no file of its own")
    stand.give(6, "second")
    stand.proxy.lose(loss, 1, "PUT", rf"/{sink}/.*{path}" if path is not PREPARED else path)
    assert run_driver(stand.cell) == 0
    assert stand.proxy.lost == 1
    stand.require_exact()


@pytest.mark.parametrize("sink", SINKS)
def test_a_log_entry_whose_answers_are_all_lost_is_found_by_the_next_start(stand: Stand, sink: str) -> None:
    """The driver gives up by name; the entry was there all the time."""
    stand.give(6, "second")
    stand.proxy.lose(Loss.ANSWER, 1_000, "PUT", rf"/{sink}/{LOG_ENTRY}")
    cell = replace(stand.cell, outage_s=1.0)
    assert run_driver(cell) in (0, UNAVAILABLE)
    assert stand.proxy.lost > 0
    stand.proxy.lose(Loss.ANSWER, 0, "PUT", "nothing")
    assert run_driver(stand.cell) == 0
    stand.require_exact()


@pytest.mark.parametrize("sink", SINKS)
def test_a_log_entry_that_arrives_after_another_drivers_is_refused_by_the_store(stand: Stand, sink: str) -> None:
    """It was on its way while its driver gave up; the next driver committed in its place."""
    stand.give(6, "second")
    stand.proxy.lose(Loss.LATE, 1_000, "PUT", rf"/{sink}/{LOG_ENTRY}")
    assert run_driver(replace(stand.cell, outage_s=1.0)) == UNAVAILABLE
    stand.proxy.lose(Loss.LATE, 0, "PUT", "nothing")
    assert run_driver(stand.cell) == 0
    stand.proxy.send_late()
    assert stand.proxy.late_answers
    assert {*stand.late_statuses()} == {stand.store.TAKEN}
    assert run_driver(stand.cell) == 0
    stand.require_exact()


@pytest.mark.parametrize("sink", SINKS)
def test_a_log_entry_that_arrives_before_the_next_start_counts(stand: Stand, sink: str) -> None:
    """Its driver gave up and said that nothing was written; the next one finds the batch held, and applies it once."""
    stand.give(6, "second")
    stand.proxy.lose(Loss.LATE, 1_000, "PUT", rf"/{sink}/{LOG_ENTRY}")
    assert run_driver(replace(stand.cell, outage_s=1.0)) == UNAVAILABLE
    stand.proxy.lose(Loss.LATE, 0, "PUT", "nothing")
    stand.proxy.send_late()
    assert stand.late_statuses()[0] == stand.store.STORED
    assert run_driver(stand.cell) == 0
    stand.require_exact()


def give_up(stand: Stand, sink: str, monkeypatch: pytest.MonkeyPatch, command: CommandLine) -> dict[str, Any]:
    """A batch whose log entry is on its way is given up at its sink; then the entry arrives, and a driver goes on."""
    stand.give(6, "second")
    stand.proxy.lose(Loss.LATE, 1_000, "PUT", rf"/{sink}/{LOG_ENTRY}")
    assert run_driver(replace(stand.cell, outage_s=1.0)) == UNAVAILABLE
    stand.proxy.lose(Loss.LATE, 0, "PUT", "nothing")
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", stand.cell.database.adbc_uri)
    opener(stand.cell, stand.cell.database)  # how this process reaches the store
    (txid,) = {txn["txid"] for txn in command("status", "lossy")["topologies"][0]["unresolved"]}
    report: dict[str, Any] = command("ledger", "skip", "lossy", str(txid), sink, "--by", "Ada", "--why", "no answer")
    stand.proxy.send_late()
    assert stand.proxy.late_answers
    return report


@pytest.mark.parametrize("sink", SINKS)
def test_a_log_entry_that_arrives_after_its_batch_was_given_up_is_refused_by_the_store(
    stand: Stand, sink: str, monkeypatch: pytest.MonkeyPatch, command: CommandLine
) -> None:
    report = give_up(stand, sink, monkeypatch, command)
    assert report["kept_out_from"] is not None
    assert {*stand.late_statuses()} == {stand.store.TAKEN}
    assert (report["rows"], report["unreadable"]) == (report["listed"], [])
    assert run_driver(stand.cell) == 0
    found = contents(stand.cell, stand.cell.database)
    first, given_up = expected(stand.put[:6]), expected(stand.put)
    assert found[sink] + rejected(stand) == given_up
    assert found[sink] >= first
    (other,) = {*SINKS} - {sink}
    assert found[other] == given_up
    require_verified(stand.cell, opener=opener(stand.cell, stand.cell.database))


def rejected(stand: Stand) -> Counter[str]:
    """How often each word is in the rows that were given up."""
    with psycopg.connect(stand.cell.database.conninfo) as connection:
        inputs = connection.execute("select input from stormproof.event where kind = 'reject'").fetchall()
    rows = [json.loads(text) for (text,) in inputs]
    return sum((Counter({row["word"]: row.get("n", 1)}) for row in rows), Counter[str]())


def test_control_without_a_version_that_keeps_it_out_it_lands(
    stand: Stand, monkeypatch: pytest.MonkeyPatch, command: CommandLine
) -> None:
    monkeypatch.setattr(DeltaSession, "keep_out", lambda *_: None)
    report = give_up(stand, APPEND, monkeypatch, command)
    assert report["kept_out_from"] is None
    assert stand.late_statuses()[0] == stand.store.STORED
    run_driver(stand.cell)
    found = contents(stand.cell, stand.cell.database)[APPEND]
    assert found + rejected(stand) != expected(stand.put), "rows are in the table, and on record as given up"


def test_control_commits_without_a_transaction_identifier_are_caught(stand: Stand) -> None:
    """The tests above would see it: the topology stops, with messages that its fold does not have. The entry of an append is
    known again by its bytes, too.
    """
    stand.give(6, "second")
    stand.proxy.lose(Loss.ANSWER, 1, "PUT", rf"/{FOLD}/{LOG_ENTRY}")
    assert run_driver(replace(stand.cell, sabotage=no_transaction_identifier)) == FAILED
    assert stand.proxy.lost == 1
    assert contents(stand.cell, stand.cell.database)[FOLD] != expected(stand.put)


@pytest.mark.parametrize("damage", [lose_a_file, cut_a_file])
def test_a_file_that_is_not_there_as_it_was_written_is_never_prepared(stand: Stand, damage: Callable[[], None]) -> None:
    """The batch runs again, and nothing is blocked."""
    stand.give(6, "second")
    assert run_driver(replace(stand.cell, sabotage=damage)) == 0
    stand.require_exact()


def test_control_without_a_look_at_the_files_the_batch_is_blocked(stand: Stand) -> None:
    """Its content is fixed by then, and one of its files is nowhere."""
    stand.give(6, "second")
    assert run_driver(replace(stand.cell, sabotage=lose_a_file_unseen)) == FAILED
    with psycopg.connect(stand.cell.database.conninfo) as connection:
        blocked = connection.execute("select cause from stormproof.txn where state = 'blocked'").fetchall()
    assert blocked == [("file_lost",)]
