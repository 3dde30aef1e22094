"""The machine goes off at each failpoint: what was not fsynced is gone, or survived by chance; the next start is exact.

Real Postgres, which keeps what it promises, real Delta tables, the inline engine. Every start ends with a power loss,
also one that came to its end: what it said that it had done must be on the disk.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from support import sabotage
from support.blows import Action
from support.chain import ordeals
from support.contents import content
from support.crashes import FAILED, KILLED, Cell, run_driver
from support.operated import Operated
from support.power import Disk
from support.queues import prepared_database, put
from support.topologies import SinkMode, expected, messages, table_of
from support.verdicts import require_exact

from stormproof.core.base.errors import SinkRefused
from stormproof.core.base.message import Guarantee
from stormproof.core.postgres.database import Database
from stormproof.sinks.contract.protocol import SinkProblem
from stormproof.sinks.delta.log import DeltaLog

pytestmark = [pytest.mark.postgres, pytest.mark.timeout(300)]

NAME = "power"
STARTS_PER_CHECK = 8
UNSYNCED = "delta.after_log_entry"
"""Where something is surely lost."""
LUCKY_LOSSES = 10
LUCKY_PLACES = [
    "prepare.after=kill",
    "delta.after_log_entry=kill@1",
    *["delta.after_log_entry=kill@2"] * 3,
    "commit.after_sink=kill@1",
]
"""Mostly where a MERGE stands in the log and nothing of it is synced."""


@dataclass
class Life:
    """One topology on a machine that goes off at the end of each start, whatever its end was."""

    cell: Cell
    luck: random.Random | None = None
    put: list[bytes] = field(default_factory=list[bytes])
    lost: list[str] = field(default_factory=list[str])
    starts: int = 0

    def give(self, *payloads: bytes) -> None:
        put(self.cell.database, self.cell.queue, payloads)
        self.put += payloads

    def start(self, armed: str = "") -> int:
        """Run a driver to its end, and lose the power; `lost` names what that took."""
        self.starts += 1
        if armed:
            self.give(f"s{self.starts} common s{self.starts}".encode(), b"common again")
        disk = Disk(self.cell)
        code = run_driver(disk.recording(), armed)
        self.lost = disk.go_off(self.luck)
        return code

    def require_exact(self) -> None:
        assert self.start() == 0
        require_exact(self.cell, expected(self.put))


def life(database: Database, folder: Path, mode: SinkMode | None = None) -> Life:
    """Fails soon where a table cannot be read any more."""
    cell = Cell(NAME, mode, Guarantee.EXACTLY_ONCE, folder, prepared_database(database), NAME, 4, outage_s=2)
    return Life(cell)


@pytest.mark.parametrize(("in_flight", "batch_messages"), [(1, 4), (4, 2)])
def test_the_machine_goes_off_at_every_failpoint(
    database: Database, tmp_path: Path, in_flight: int, batch_messages: int, seed: int
) -> None:
    """Half of them, by the seed, with one batch in flight, the other half with four. Each start finds what the last loss
    left, and meets its own."""
    one = life(database, tmp_path)
    one.cell = replace(one.cell, in_flight=in_flight, batch_messages=batch_messages)
    one.give(*messages(3))
    lost: Counter[str] = Counter()
    cells = ordeals([Action.KILL])
    half = [cell for n, cell in enumerate(cells, seed + (in_flight > 1)) if n % 2 or cell.must == UNSYNCED]
    for number, ordeal in enumerate(half, 1):
        starts = ordeal.starts[:-1]  # the last one deals the same blow again
        codes = [one.start(";".join(blow.armed for blow in blows)) for blows in starts]
        assert codes[-1] == KILLED, f"{ordeal.name}: {codes}"
        lost[starts[-1][-1].point] += sum(not path.startswith("home/staging/heartbeat") for path in one.lost)
        if number % STARTS_PER_CHECK == 0:
            one.require_exact()
    one.require_exact()
    assert lost[UNSYNCED] >= 2  # else nothing was shown


def test_what_was_not_synced_may_have_survived(
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seed: int,
) -> None:
    """By chance, piece by piece: a start is exact, or blocked by name, and exact after `retry`."""
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    rng = random.Random(seed)
    one = life(database, tmp_path)
    one.cell = replace(one.cell, sabotage=sabotage.frequent_checkpoints)
    one.require_exact()
    one.luck = rng
    operator = Operated(one.cell, capsys)
    blocked = 0
    for _ in range(LUCKY_LOSSES):
        assert one.start(rng.choice(LUCKY_PLACES)) == KILLED
        if one.start() == FAILED:
            ((txid, reason),) = operator.sql("select txid, reason from stormproof.txn where state = 'blocked'")
            assert "file lost" in reason
            operator.command("retry", NAME, str(txid), "--why", "power loss")
            blocked += 1
        one.require_exact()
    print(f"{blocked} of {LUCKY_LOSSES} losses needed a retry")


@pytest.mark.parametrize(
    ("broken", "point", "mode"),
    [
        (sabotage.no_sync, "prepare.after", SinkMode.DELTA_APPEND),
        (sabotage.no_sync, "finish.after", SinkMode.DELTA_FOLD),
        (sabotage.no_sync, "prepare.after", SinkMode.POSTGRES_FOLD),
        (sabotage.prepared_bytes_not_synced, "prepare.after", SinkMode.POSTGRES_APPEND),
        (sabotage.folders_not_synced, "prepare.after", SinkMode.DELTA_FOLD),
        (sabotage.delta_commit_not_synced, "finish.after", SinkMode.DELTA_APPEND),
        (sabotage.delta_commit_not_synced, "finish.after", SinkMode.DELTA_FOLD),
    ],
)
def test_control_without_the_fsyncs_a_power_loss_is_seen(
    database: Database, tmp_path: Path, broken: Callable[[], None], point: str, mode: SinkMode
) -> None:
    one = life(database, tmp_path, mode)
    healthy, one.cell = one.cell, replace(one.cell, sabotage=broken)
    assert one.start(f"{point}=kill") == KILLED
    one.cell = healthy
    with pytest.raises(AssertionError):
        one.require_exact()


# A MERGE whose files are gone while its log entry survived


@pytest.fixture
def merged(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Operated:
    """Txid 2 is in the table's log, unknown to the ledger."""
    monkeypatch.setenv("STORMPROOF_DATABASE_URL", database.adbc_uri)
    cell = Cell(
        NAME, SinkMode.DELTA_FOLD, Guarantee.EXACTLY_ONCE, tmp_path, prepared_database(database), NAME, outage_s=2
    )
    operated = Operated(cell, capsys)
    operated.put(b"a b")
    operated.run()
    operated.put(b"a a c")
    assert run_driver(cell, "delta.after_log_entry=kill") == KILLED
    return operated


def log_of(operated: Operated) -> DeltaLog:
    return DeltaLog(str(operated.cell.folder / "lake" / table_of(SinkMode.DELTA_FOLD, NAME)))


def lose_files(operated: Operated) -> Path:
    """What the newest version added is gone, as far as its bytes go."""
    log = log_of(operated)
    entry = log.entry(log.versions()[-1])
    assert entry is not None
    (added,) = entry.added
    path = Path(log.table, added.path)
    path.write_bytes(b"")
    return path


def test_retry_takes_a_merge_back_whose_files_were_lost_and_merges_again(merged: Operated) -> None:
    lost = lose_files(merged)
    with pytest.raises(SinkRefused, match=rf"blocked.*file lost.*{lost.name}.*stormproof retry {NAME} 2") as caught:
        merged.run()
    assert caught.value.details["problem"] == SinkProblem.FILE_LOST
    with pytest.raises(SinkRefused, match="is blocked"):
        merged.run()  # it stays so until somebody decides
    said = merged.text("retry", NAME, "2", "--why", "power loss")
    assert f"{lost.name} has 0 bytes" in said
    assert "the table is as in version 1 again" in said
    merged.verify()  # between the two: the table holds what the ledger says
    merged.put(b"c d")
    merged.run()
    assert content(SinkMode.DELTA_FOLD, NAME, merged.cell.folder, merged.cell.database) == Counter(
        {"a": 3, "b": 1, "c": 2, "d": 1}
    )
    merged.verify()
    assert "restored" in str(merged.sql("select detail from stormproof.event where reason like 'retry%'"))


def test_retry_refuses_where_later_versions_would_be_lost_or_nothing_is_left_to_merge(merged: Operated) -> None:
    lost = lose_files(merged)
    with pytest.raises(SinkRefused, match="file lost"):
        merged.run()
    prepared, *_ = (merged.cell.folder / "lake" / ".stormproof-staging").glob("*/*-2-1-*.parquet")
    kept = prepared.read_bytes()
    prepared.unlink()
    error = merged.command("retry", NAME, "2", status=1)["error"]["message"]
    assert prepared.name in error
    prepared.write_bytes(kept)
    log = log_of(merged)
    entry = Path(log.entry_path(log.versions()[-1] + 1))
    entry.write_text('{"commitInfo":{"operation":"somebody else\'s"}}')
    error = merged.command("retry", NAME, "2", status=1)["error"]["message"]
    assert lost.name in error
    assert "versions up to 3 came after it" in error
    assert merged.sql("select state from stormproof.txn where txid = 2") == [("blocked",)]
    entry.unlink()
    merged.command("retry", NAME, "2")
    merged.run()
    merged.verify()


def test_a_retry_that_is_killed_behind_the_restore_is_made_again(
    merged: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_files(merged)
    with pytest.raises(SinkRefused, match="file lost"):
        merged.run()
    with monkeypatch.context() as broken:
        broken.setattr("stormproof.trident.ledger.txns.move", _die)
        merged.command("retry", NAME, "2", status=1)
    assert merged.sql("select state from stormproof.txn where txid = 2") == [("blocked",)]
    assert merged.command("retry", NAME, "2")["restored"] == {}
    merged.run()
    assert content(SinkMode.DELTA_FOLD, NAME, merged.cell.folder, merged.cell.database)["a"] == 3
    merged.verify()


def _die(*_: object, **__: object) -> None:
    raise SinkRefused("the power went off")
