"""A driver of P19 in a process of its own: it answers each line of its standard input with the seconds of a batch."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from benchmarks.word_count import word_count
from stormproof.core.base.message import Guarantee
from stormproof.core.contract.source import Limit
from stormproof.core.engine.spark import SparkEngine, spark_session
from stormproof.core.postgres.database import Database
from stormproof.core.source.files import FileSource
from stormproof.core.start.settings import Settings
from stormproof.sinks.delta.sink import DeltaSink
from stormproof.sinks.postgres.sink import PostgresSink
from stormproof.trident.driver.options import RunOptions
from stormproof.trident.driver.run import driver

LIMIT_BYTES = 2**40


def main() -> None:
    """Start, say so, and take the topology on by a batch for each line, until there is no more input."""
    given: dict[str, str] = json.loads(sys.argv[1])
    options, database = json.loads(given["options"]), Database.from_url(given["database"])
    messages, parallelism = int(given["messages"]), int(given["parallelism"])
    settings = Settings(
        home=Path(given["home"]),
        master=given["master"],
        database_url=given["database"],
        parallelism=parallelism,
        staging_dir=f"{given['counts']}-staging",
        storage_options=options,
    )
    source = FileSource(given["lines"], name="lines", storage_options=options, database=database)
    sinks = (DeltaSink(given["counts"], name="delta", storage_options=options), PostgresSink(given["table"]))
    topology = word_count(given["name"], source, *sinks)
    engine = SparkEngine(
        spark_session(settings, spark__driver__memory="2g", spark__executor__memory=given["memory"]), parallelism
    )
    limits = RunOptions(guarantee=Guarantee.EXACTLY_ONCE, limit=Limit(messages, LIMIT_BYTES), message_timeout_s=600.0)
    with driver(topology, settings=settings, engine=engine, options=limits) as coordinator:
        coordinator.recover(sweep=True)
        print("ok started", flush=True)
        for _ in sys.stdin:
            started_s = time.perf_counter()
            result = coordinator.step()
            if result is None or result.state != "committed" or result.messages != messages or result.attempts != 1:
                print(f"failed {result}".replace("\n", " "), flush=True)
                return
            print(f"ok {time.perf_counter() - started_s}", flush=True)


if __name__ == "__main__":
    main()
