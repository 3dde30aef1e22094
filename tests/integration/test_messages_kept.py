"""`audit verify --deep` of committed messages that their source still keeps: what is altered or removed there is found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.crashes import Cell
from support.operated import Operated
from support.plants import MESSAGES_FOUND, void
from support.redelivering import ToyServer, ToySource
from support.topologies import source_of

from stormproof import FileSource, PostgresSink, Topology
from stormproof.core.pending.connector import Kept, OpenedSlice
from stormproof.core.pending.rows import Subscriber
from stormproof.core.source.kafka.position import KafkaAudit
from stormproof.core.source.postgres_queue.audit import QueueAudit
from stormproof.core.source.rabbitmq.stream_position import StreamAudit

pytestmark = [pytest.mark.postgres]
NAME: Final = "kept"
LINES: Final = [b"%d" % number for number in range(100, 112)]
QUEUE: Final = "stormproof_queue.kept"
JOURNAL: Final = "stormproof.pending_message"


def rows_of(cell: Cell, name: str, path: str) -> Topology:
    t = Topology(name)
    source = FileSource(path, "parquet" if path.endswith("parquet") else "text", schema="line string", name=name)
    t.stream("lines", source).into(PostgresSink(name, database=cell.database))
    return t


def build(cell: Cell) -> Topology:
    t = Topology(NAME)
    t.stream("lines", source_of(cell.queue, cell.database)).into(PostgresSink("numbers", database=cell.database))
    return t


@pytest.fixture
def run(operated: Operated) -> Operated:
    """Topologies over a queue, a journal, files of lines and Parquet files have read twelve messages each."""
    found = replace(operated, cell=replace(operated.cell, name=NAME, queue="kept", build=build, batch_messages=5))
    found.put(*LINES)
    found.run(build(found.cell))
    server = ToyServer()
    server.put(LINES)
    toy = Topology("toy")
    toy.stream("lines", ToySource("toy", server)).into(PostgresSink("toy", database=found.cell.database))
    found.run(toy)
    folder = found.cell.folder
    (folder / "a.txt").write_bytes(b"\n".join(LINES) + b"\n")
    pq.write_table(pa.table({"line": [line.decode() for line in LINES]}), folder / "a.parquet", compression="none")
    for name, path in (("texts", "*.txt"), ("parquets", "*.parquet")):
        found.run(rows_of(found.cell, name, f"{folder}/{path}"))
    return found


def verified(run: Operated, name: str, status: int) -> dict[str, Any]:
    report: dict[str, Any] = run.command("audit", "verify", name, "--deep", status=status)
    return report


def _file(name: str, change: Callable[[bytes], bytes]) -> Callable[[Operated], None]:
    def changed(run: Operated) -> None:
        path: Path = run.cell.folder / name
        path.write_bytes(change(path.read_bytes()))

    return changed


def _sql(statement: str) -> Callable[[Operated], None]:
    return lambda run: void(run.sql(statement))


PLANTS: Final[dict[str, dict[str, Callable[[Operated], None]]]] = {
    "a message is altered": {
        NAME: _sql(f"update {QUEUE} set payload = '7' where payload = '105'"),
        "toy": _sql(f"update {JOURNAL} set payload = '7' where number = 5"),
        "texts": _file("a.txt", lambda content: content.replace(b"105", b"705")),
        "parquets": _file("a.parquet", lambda content: content.replace(b"105", b"705", 1)),
    },
    "a message is removed": {
        NAME: _sql(f"delete from {QUEUE} where payload = '105'"),
        "toy": _sql(f"delete from {JOURNAL} where number = 5"),
        "texts": _file("a.txt", lambda content: content.replace(b"105\n", b"")),
    },
    "two messages change places": {
        NAME: _sql(
            f"update {QUEUE} set payload = case payload when '105' then '106'::bytea else '105'::bytea end"
            " where payload in ('105', '106')"
        ),
        "toy": _sql(
            f"update {JOURNAL} set payload = case number when 5 then '106'::bytea else '105'::bytea end"
            " where number in (5, 6)"
        ),
        "texts": _file("a.txt", lambda content: content.replace(b"105\n106", b"106\n105")),
    },
    "a message is put between those that were read": {
        "texts": _file("a.txt", lambda content: content.replace(b"105\n", b"105\n7\n")),
    },
    "a payload is emptied": {"toy": _sql(f"update {JOURNAL} set payload = null where number = 5")},
}


def test_messages_that_are_as_they_were_read_are_compared_and_clean(run: Operated) -> None:
    for name in (NAME, "toy", "texts", "parquets"):
        assert verified(run, name, 0)["kept"]["messages"] == len(LINES), name


@pytest.mark.parametrize("what", PLANTS)
def test_a_committed_message_that_was_changed_in_its_source_is_found(run: Operated, what: str) -> None:
    assert MESSAGES_FOUND[what] == PLANTS[what].keys()
    for name, plant in PLANTS[what].items():
        plant(run)
        kinds = {one["kind"] for one in verified(run, name, 1)["violations"]}
        assert "payload_changed" in kinds, name


def test_what_the_source_keeps_no_longer_is_no_alarm(run: Operated) -> None:
    run.sql(f"truncate {QUEUE}")
    run.sql("update stormproof.pending_message set payload = null")
    run.sql(f"delete from {JOURNAL} where number < 7")
    for path in ("a.txt", "a.parquet"):
        (run.cell.folder / path).unlink()
    for name in ("toy", "texts", "parquets"):
        assert verified(run, name, 0)["kept"]["messages"] == 0, name


def test_a_slice_of_an_earlier_version_is_said_not_to_be_compared(run: Operated) -> None:
    run.sql("update stormproof.txn set position = position #- '{content}' #- '{at,content}' where txid = 1")
    report = verified(run, NAME, 4)
    assert report["verdict"] == "not_compared"
    assert "the messages that the source keeps" in str(report["reach"])


def test_both_hashes_of_a_payload_give_one_number(operated: Operated) -> None:
    ((version,),) = operated.sql("select current_setting('server_version_num')::int")
    if version < 180_000:
        pytest.skip("Postgres has one of them alone before version 18")
    payload = "convert_to(repeat(g::text, g % 50), 'UTF8')"
    drawn = f"select {payload} as p, g * 987654321::bigint as id from generate_series(-500, 500) g"
    differ = "hashbyteaextended(p, id) <> hash_record_extended(row(p), id)"
    assert operated.sql(f"select count(*), count(*) filter (where {differ}) from ({drawn}) m") == [(1001, 0)]


def test_of_messages_that_a_server_alone_has_it_says_that_they_are_not_compared() -> None:
    who, slices = Subscriber("kafka", "orders", "t"), [OpenedSlice({}, "txid 1", 1, taken=True)]
    for audit in (KafkaAudit(who, None), StreamAudit(who, None)):
        assert "no digest of them is on record" in audit.kept(slices).left_out[0]
        assert audit.kept([]).left_out == ()


def test_control_without_the_comparison_an_altered_message_goes_unnoticed(
    run: Operated, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(QueueAudit, "kept", lambda *_: Kept())
    PLANTS["a message is altered"][NAME](run)
    assert verified(run, NAME, 0)["violations"] == []
