"""What the command takes: which figures, how many pairs, where the JSON goes."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

PAIRS = 15

TITLES = {
    "P1a": "exactly-once word count, beside plain Spark writing untracked Parquet",
    "P1b": "exactly-once word count, beside plain Spark's MERGE and append to Delta",
    "P1q": "the same from a Postgres queue, beside plain Spark with a reader of its own",
    "P2": "tracked beside untracked, same engine",
    "P3": "words/s of the main job, beside Apache Storm",
    "P4": "words/s and rows/s into Postgres, beside Trident",
    "P5": "1,000 messages from open to committed, beside foreachBatch",
    "P6": "row-wise Python, beside a plain mapInArrow row loop",
    "P7": "Postgres queue, beside leases by UPDATE and DELETE",
    "P8": "the acker's memory and speed with a million pending, beside a dict of objects",
    "P9": "a batch with a long past behind it and a long queue before it, beside a short one",
    "P10": "one bad message in 10,000, beside none",
    "P11": "each question of the audit over 10 million messages, beside one second",
    "P12": "rows appended to Delta and Postgres, beside Spark's writers and plain binary COPY",
    "P13": "rows upserted by key, beside COPY with ON CONFLICT and MERGE INTO by Spark",
    "P14": "the driver's memory with batches of 10 million rows, beside batches of a tenth",
    "P15": "messages from Kafka to Delta exactly once, beside Spark's Kafka source",
    "P16": "messages from RabbitMQ, Redis and NATS to Delta exactly once, beside their clients' plain loops",
    "P17": "a driver's messages/s, and the ledger's processor time, with the page open in 20 tabs",
    "P18": "P1, P2 and P5 with tables in an object store, beside Spark that writes there by s3a",
    "P19": "four executors beside two with as many cores; a batch of 1,000 tasks, beside plain Spark",
    "P20": "a function that waits for a service, several calls at a time, beside a thread pool in mapInArrow",
    "groupings": "words through an exchange by each grouping, beside Spark's repartition",
    "in-flight": "four batches in flight, beside one",
    "verdicts": "a verdict a message, beside one a batch",
}


@dataclass(frozen=True, slots=True)
class Options:
    """The command's arguments."""

    figures: tuple[str, ...]
    json: Path | None
    pairs: int


def parse(arguments: Sequence[str] | None) -> Options:
    """The arguments, checked before anything is started; the process ends with 2 where they are wrong."""
    known = "\n".join(f"  {name:11}{title}" for name, title in TITLES.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measures each figure beside its rival, in pairs.",
        epilog=f"figures:\n{known}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figures", nargs="*", metavar="FIGURE", help="which ones; all by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results go, for machines")
    parser.add_argument("--pairs", type=int, default=PAIRS, metavar="N", help=f"pairs of runs a figure ({PAIRS})")
    found = parser.parse_args(arguments)
    figures = tuple(dict.fromkeys(found.figures)) or tuple(TITLES)
    unknown = sorted(set(figures) - set(TITLES))
    if unknown:
        parser.error(f"no figure {', '.join(unknown)}; known: {', '.join(TITLES)}")
    if found.pairs < 1:
        parser.error(f"--pairs is {found.pairs}; it must be at least 1")
    return Options(figures, found.json, found.pairs)
