"""Reads the demo's Delta table as any user of Spark reads it, in a process of its own: `demo_read_delta.py TABLE HOME JARS`.

Prints the rows as JSON, `[[word, n], ...]`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from stormproof import Settings, spark_session


def main(table: str, home: str, jars: str) -> None:
    """Read and print all rows."""
    session = spark_session(Settings(master="local[2]", home=Path(home), delta_jars_dir=Path(jars)))
    rows = session.read.format("delta").load(table).select("word", "n").collect()
    sys.stdout.write(json.dumps([(row["word"], row["n"]) for row in rows]))
    session.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
