"""A topology over a queue in a database of its own; its driver is a child process, and an operator is in this one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, Final

from stormproof.core.postgres.database import Database, connect
from support.brokers import until
from support.command_line import CommandLine
from support.queues import put

NAME: Final = "orders"
FILE: Final = """
import os
from stormproof import PostgresQueue, PostgresSink, Topology

def number(line: str) -> int:
    if os.path.exists("broken") or line.startswith("poison"):
        raise ValueError(line)
    return int(line)

def topology() -> Topology:
    t = Topology("orders")
    source = PostgresQueue("orders", max_attempts=2, backoff_base_s=0.001, backoff_max_s=0.001)
    t.stream("lines", source).map(number, "line", schema="n bigint").into(PostgresSink("numbers"))
    return t
"""
"""Every line fails while the file `broken` is there; "poison" always does."""


class Driven:
    """The topology of `FILE`, in the working folder."""

    def __init__(self, database: Database, command: CommandLine) -> None:
        self.database = database
        self.command = command

    @contextmanager
    def driver(
        self, *more: str, output: int = subprocess.DEVNULL, **environment: str
    ) -> Generator[subprocess.Popen[str]]:
        """`stormproof run`, for ever; killed at the end if it still runs. `output`: where what it prints goes."""
        words = ("run", "orders.py:topology", "--engine", "inline", "--interval", "0.02", "--json", *more)
        with subprocess.Popen(
            [sys.executable, "-m", "stormproof", *words],
            env={**os.environ, "STORMPROOF_LOG_LEVEL": "warning", **environment},
            stdout=output,
            stderr=output,
            text=True,
        ) as child:
            try:
                yield child
            finally:
                child.kill()

    def put(self, *lines: str) -> None:
        put(self.database, NAME, [line.encode() for line in lines])

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        with connect(self.database, application_name="tests", autocommit=True) as connection:
            cursor = connection.execute(query.encode())
            return [] if cursor.description is None else cursor.fetchall()

    def until_rows(self, query: str, *rows: tuple[Any, ...]) -> None:
        until(lambda: self.rows(query) == list(rows), f"{query}: not {rows}")

    def until_dead(self, number: int) -> None:
        """Wait for so many dead letters about which nobody has decided."""
        self.until_rows("select count(*)::int from stormproof.dead_letter where disposal is null", (number,))

    def until_numbers(self, *numbers: int) -> None:
        """Wait until the table holds just these."""
        self.until_rows("select n from numbers order by n", *((number,) for number in numbers))

    def numbers(self) -> list[int]:
        return [number for (number,) in self.rows("select n from numbers order by n")]
