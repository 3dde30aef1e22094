"""The long form of the streams' tests: the driver of a query killed at every failpoint (twice in a row, or once on Spark).

python tests/stream_torture.py --rounds 3 --seed 7            # with the stand-in for Spark: some minutes a round
python tests/stream_torture.py --spark                        # real queries, files and rate: half an hour or so
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path

from support.queues import prepared_database
from support.stream_chain import StreamChain, points_of
from support.stream_driver import run_files_on_spark, run_rate_on_spark
from support.streams import Form, StreamCell, run_stream_driver

from stormproof.core.postgres.embedded import EmbeddedPostgres


def main() -> None:
    """Run the rounds; an AssertionError names what is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--spark", action="store_true")
    parser.add_argument("--only", choices=list(Form), type=Form, action="append", help="this form alone")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="stormproof-streams-") as folder:
        server = EmbeddedPostgres(Path(folder) / "pg")
        server.acquire()
        try:
            database = prepared_database(server.database)
            for number in range(given.rounds):
                rng = random.Random(given.seed + number)
                for form in given.only or Form:
                    # Spark itself tries a task again that raises an error: no attempt follows another there.
                    points = [p for p in points_of(form) if not (given.spark and p.scope == "retry")]
                    rng.shuffle(points)
                    by_clock = given.spark and form is Form.SINKS
                    start = run_stream_driver
                    if given.spark:
                        start = run_rate_on_spark if by_clock else run_files_on_spark
                    cell = StreamCell(f"{form}-{number}", form, Path(folder) / f"{form}-{number}", database)
                    for line in StreamChain(cell, start, twice=not given.spark, by_clock=by_clock).run(points):
                        print(f"seed {given.seed + number}, {form}: {line}", flush=True)
        finally:
            server.release()


if __name__ == "__main__":
    main()
