"""How a log spells the paths of files: which of them delta-rs repeats letter by letter when a merge removes the file."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
from deltalake import DeltaTable, Schema, write_deltalake

from stormproof.sinks.delta.log import DeltaLog, live_adds, paths_outside, respelled_paths

SCHEMA = pa.schema([("id", pa.int64()), ("n", pa.int64())])
RAW = [chr(code) for code in range(0x21, 0x7F) if chr(code) not in "#%/?\\"]
ENCODED = [f"%{code:02X}" for code in range(0x20, 0x7F) if code != ord("/")]
BEYOND = ["ü", "日", "😀", "%C3%BC", "%c3%bc", "%2a", "%E6%97%A5"]


def test_a_path_counts_as_kept_just_where_a_merge_of_delta_rs_removes_the_file_by_it(tmp_path: Path) -> None:
    paths = [f"{at}/x{letter}y.parquet" for at, letter in enumerate([*RAW, *ENCODED, *BEYOND])]
    DeltaTable.create(tmp_path, Schema.from_arrow(SCHEMA))
    adds = [{"add": added(tmp_path, at, path)} for at, path in enumerate(paths)]
    (tmp_path / "_delta_log" / f"{1:020}.json").write_text(
        "\n".join(json.dumps(action, ensure_ascii=False) for action in ({"commitInfo": {}}, *adds))
    )
    table = DeltaTable(tmp_path)
    found = frozenset(respelled_paths(table, most=len(paths)))
    rows = pa.table({"id": range(len(paths)), "n": [1] * len(paths)}, SCHEMA)
    table.merge(rows, "t.id = s.id", source_alias="s", target_alias="t").when_matched_update_all().execute()
    entry = [json.loads(line) for line in (tmp_path / "_delta_log" / f"{2:020}.json").read_text().splitlines()]
    kept = {action["remove"]["path"] for action in entry if "remove" in action}
    assert {path for path in paths if path not in kept} == found
    assert paths_outside(table) == ()


def added(folder: Path, at: int, path: str) -> dict[str, object]:
    file = folder / unquote(path)
    file.parent.mkdir()
    pq.write_table(pa.table({"id": [at], "n": [0]}, SCHEMA), file)
    told = {"size": file.stat().st_size, "modificationTime": 1, "dataChange": True, "partitionValues": {}}
    return {"path": path, **told, "stats": json.dumps({"numRecords": 1})}


def test_a_checkpoint_that_lacks_one_of_its_files_is_none(tmp_path: Path) -> None:
    for _ in range(3):
        write_deltalake(tmp_path, pa.table({"id": [1], "n": [0]}, SCHEMA), mode="append")
    DeltaTable(tmp_path).create_checkpoint()
    log = DeltaLog(str(tmp_path))
    whole = Path(log.checkpoint_path(2))
    rows = pq.read_table(whole)
    for part, end in ((1, 2), (2, rows.num_rows)):
        name = f"{2:020}.checkpoint.{part:010}.{2:010}.parquet"
        pq.write_table(rows.slice(0 if part == 1 else 2, end), tmp_path / "_delta_log" / name)
    whole.unlink()
    assert log.checkpoints(of_all=True) == {2}
    assert len(live_adds(log, 2)) == 3
    (tmp_path / "_delta_log" / name).unlink()
    assert log.checkpoints(of_all=True) == frozenset()
    assert len(live_adds(log, 2)) == 3
