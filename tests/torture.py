"""Kill drivers on Spark at every failpoint, in one chain, over and over: ``make torture ROUNDS=n SEED=s``.

Each round is one topology with all four sinks, over an embedded Postgres of its own; the order of the failpoints comes from
the seed, which is printed. Exit status 1 at the first difference.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from support.chain import all_points, chain
from support.crashes import run_driver
from support.queues import prepared_database
from support.spark_driver import run_spark_driver

from stormproof.core.postgres.embedded import EmbeddedPostgres


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--engine", choices=("spark", "inline"), default="spark")
    arguments = parser.parse_args()
    seed = random.SystemRandom().randrange(2**32) if arguments.seed is None else arguments.seed
    print(f"seed {seed} (repeat with SEED={seed})", flush=True)
    rng = random.Random(seed)
    start = run_spark_driver if arguments.engine == "spark" else run_driver
    for number in range(1, arguments.rounds + 1):
        began = time.monotonic()
        with (
            tempfile.TemporaryDirectory(prefix="stormproof-torture-") as folder,
            EmbeddedPostgres(Path(folder) / "pg") as pg,
        ):
            made = chain(prepared_database(pg), Path(folder), start)
            try:
                for line in made.run(all_points(rng)):
                    print(f"round {number}: {line} ({time.monotonic() - began:.0f} s)", flush=True)
            except AssertionError as error:
                print(f"round {number}, seed {seed}: {error}", file=sys.stderr)
                return 1
        deaths = sum(made.killed_at.values())
        print(
            f"round {number}: exact after {made.starts} starts and {deaths} deaths at {len(made.killed_at)} failpoints"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
