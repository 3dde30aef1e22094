"""A driver of its own that commits to a Delta table through Spark, to be killed: `python -m support.spark_committer`.

Arguments: the folder, the sink's kind. The second transaction is described in `second.json` before it is committed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stormproof.core.contract.sink import PreparedFile, files_to_json
from stormproof.sinks.contract.protocol import PreparedTransaction
from support.sink_harness import SinkHarness

DESCRIPTION = "second.json"


def main(folder: str, kind: str) -> None:
    harness = SinkHarness(kind, Path(folder), None, committer="spark")
    session = harness.open()
    session.commit(harness.prepare(session, 1, None, {"a": 1, "b": 2}), checked=True)
    second = harness.prepare(session, 2, 1, {"a": 10, "c": 3})
    (Path(folder) / DESCRIPTION).write_text(json.dumps([second.digest, second.rows, files_to_json(second.files)]))
    print("commits", flush=True)
    session.commit(second, checked=True)
    print("committed", flush=True)


def second_of(folder: Path) -> PreparedTransaction:
    """The transaction that such a driver prepared."""
    digest, rows, files = json.loads((folder / DESCRIPTION).read_text())
    return PreparedTransaction(2, 1, digest, rows, tuple(PreparedFile(**file) for file in files))


if __name__ == "__main__":
    main(*sys.argv[1:])
