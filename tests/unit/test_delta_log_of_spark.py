"""What Spark writes into a Delta table's log, read without Spark: our metadata, deletion vectors, torn entries."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stormproof.sinks.delta.log import APPLICATION, DIGEST, EPOCH, REMOVED, REPAIRS, ROWS, TXID, DeltaLog, OurCommit
from stormproof.sinks.delta.power_loss import tear

OURS = {APPLICATION: "stormproof/t/i/s", TXID: "7", DIGEST: "d", ROWS: "3", EPOCH: "2"}
REPAIR = {REPAIRS: OURS[APPLICATION], REMOVED: "4"}


def entry(operation: str, metrics: dict[str, Any], *added: dict[str, Any], ours: Any = OURS) -> bytes:
    info = {"operation": operation, "operationMetrics": metrics, "engineInfo": "Apache-Spark/4.2.0 Delta-Lake/4.4.0"}
    told = {"commitInfo": {**info, "userMetadata": ours if isinstance(ours, str) else json.dumps(ours)}}
    actions = [told, {"txn": {"appId": OURS[APPLICATION], "version": 7}}, *({"add": add} for add in added)]
    return "\n".join(map(json.dumps, actions)).encode()


def add(rows: int, **more: Any) -> dict[str, Any]:
    return {"path": "f.parquet", "size": 9, "stats": json.dumps({"numRecords": rows}), **more}


def log_with(folder: Path, content: bytes) -> DeltaLog:
    log = DeltaLog(str(folder))
    Path(log.folder).mkdir()
    Path(log.entry_path(0)).write_bytes(content)
    return log


def test_our_metadata_is_read_where_spark_keeps_it(tmp_path: Path) -> None:
    found = log_with(tmp_path, entry("WRITE", {}, add(3))).entry(0)
    assert found is not None
    assert found.ours(OURS[APPLICATION]) == OurCommit(0, 7, "d", 3, 2, checked=True)
    assert found.is_by_spark
    assert found.is_stormproofs


def test_a_repair_is_ours_and_changes_no_content(tmp_path: Path) -> None:
    found = log_with(tmp_path, entry("MERGE", {}, add(3), ours=REPAIR)).entry(0)
    assert found is not None
    assert (found.is_stormproofs, found.changes_content, found.info[REMOVED]) == (True, False, "4")


@pytest.mark.parametrize("text", ["free text", "stormproof. was here", '{"stormproof.txid": "7"}', "[]"])
def test_metadata_of_others_is_not_ours(text: str, tmp_path: Path) -> None:
    found = log_with(tmp_path, entry("WRITE", {}, add(3), ours=text)).entry(0)
    assert found is not None
    assert found.ours(OURS[APPLICATION]) is None
    assert not found.is_stormproofs


@pytest.mark.parametrize(
    ("vector", "path"),
    [
        (
            {"storageType": "u", "pathOrInlineDv": "ab^-aqEH.-t@S}K{vb[*k^"},
            "ab/deletion_vector_d2c639aa-8816-431a-aaf6-d3fe2512ff61.bin",
        ),
        ({"storageType": "p", "pathOrInlineDv": "s3://b/dv%20.bin"}, "s3://b/dv .bin"),
        ({"storageType": "i", "pathOrInlineDv": "wi5b=000010000siXQKl0rr91000f55c8Xg0@@D72lkbi5=-{L"}, None),
    ],
)
def test_the_file_of_a_deletion_vector(vector: dict[str, Any], path: str | None, tmp_path: Path) -> None:
    found = log_with(tmp_path, entry("MERGE", {}, add(3, deletionVector=vector))).entry(0)
    assert found is not None
    (file,) = found.added
    assert (file.has_deletions, file.deletion_file) == (True, path)


@pytest.mark.parametrize(
    ("content", "torn"),
    [
        (entry("WRITE", {"numFiles": "1"}, add(3)), None),
        (entry("WRITE", {"numFiles": "1"}), "0 of 3 rows"),
        (entry("WRITE", {"numFiles": "2"}, add(2)), "2 of 3 rows"),
        (entry("WRITE", {"numFiles": "1"}, ours={**OURS, ROWS: "0"}), None),
        (entry("MERGE", {"numTargetFilesAdded": "1"}, add(3)), None),
        (entry("MERGE", {"numTargetFilesAdded": "1"}, add(3), add(2)), None),
        (entry("MERGE", {"numTargetFilesAdded": "2"}, add(3)), "1 of 2 files"),
        (entry("MERGE", {"numTargetFilesAdded": "0"}), None),
        (entry("MERGE", {"numTargetFilesAdded": "1"}, add(3), ours=REPAIR), None),
        (entry("MERGE", {"numTargetFilesAdded": "1"}, ours=REPAIR), "0 of 1 files"),
    ],
)
def test_a_torn_entry_of_spark_is_told(content: bytes, torn: str | None) -> None:
    found = tear(content)
    assert found is None if torn is None else found is not None and torn in found
