"""Ten thousand garbage messages, and functions that misbehave in every way: all is processed or a dead letter by name.

What must come of each message is known when it is made, so that the sinks' content is compared exactly.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import psycopg
import pytest
from deltalake import DeltaTable
from support.queues import prepared_database, put
from support.verdicts import verified

from stormproof import DeltaSink, PostgresQueue, PostgresSink, Topology, count
from stormproof.core.postgres.database import Database
from stormproof.core.start.settings import Settings
from stormproof.trident.driver.run import driver
from stormproof.trident.terms.observers import RunStatistics

pytestmark = pytest.mark.postgres

MESSAGES = 10_000
MAX_ATTEMPTS = 2
HUGE_BYTES = 1_000_000


@dataclass(frozen=True, slots=True)
class Made:
    """A message, and the reason for which it must end as a dead letter; None: it must be processed."""

    payload: bytes
    dies_of: str | None


# -- functions that misbehave ------------------------------------------------------------------------------------------


class WithoutText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


class ExitsInText(Exception):
    def __str__(self) -> str:
        if self.args == ():
            sys.exit("from __str__")
        return ""


class WithoutRepr:
    def __repr__(self) -> str:
        raise ValueError("no repr \x00")

    def __hash__(self) -> int:
        return 1

    def __eq__(self, other: object) -> bool:
        return self is other


class BadText(str):
    """Text whose own methods lie."""

    def isprintable(self) -> bool:
        return True


class NotAnIterable:
    def __iter__(self) -> Iterator[str]:
        raise KeyError("\x00")


def _raise(error: BaseException) -> NoReturn:
    raise error


def _recurse(depth: int = 0) -> int:
    return _recurse(depth + 1) + 1


def _half_a_generator() -> Iterator[str]:
    yield "never"
    yield "written"
    raise ValueError("in the middle \x00 \udc80")


MISBEHAVE: Mapping[str, Callable[[], Any]] = {
    "!nul": lambda: _raise(ValueError("a \x00 b")),
    "!surrogate": lambda: _raise(ValueError("a \ud800 b")),
    "!unprintable": lambda: _raise(ValueError("".join(map(chr, range(32))) + "\x7f\x85\u2028\ufeff\U000e0001")),
    "!bytes": lambda: _raise(ValueError(b"\x00\xff")),
    "!long": lambda: _raise(ValueError("\x00" * 100_000)),
    "!no-text": lambda: _raise(WithoutText()),
    "!exits-in-text": lambda: _raise(ExitsInText()),
    "!lying-text": lambda: _raise(ValueError(BadText("a \x00 b"))),
    "!exit": lambda: sys.exit(3),
    "!exit-nul": lambda: sys.exit("\x00"),
    "!cancelled": lambda: _raise(asyncio.CancelledError("\x00")),
    "!generator-exit": lambda: _raise(GeneratorExit()),
    "!recursion": _recurse,
    "!memory": lambda: _raise(MemoryError()),
    "!stop": lambda: _raise(StopIteration("\x00")),
    "!group": lambda: _raise(BaseExceptionGroup("\x00", [ValueError("\x00"), SystemExit(1)])),
    "!system": lambda: "abc".encode("ascii").decode("utf-16"),
    "!none": lambda: None,
    "!number": lambda: 7,
    "!text": lambda: "not a list",
    "!object": object,
    "!numbers": lambda: [1, 2],
    "!nones": lambda: [None],
    "!raw": lambda: [b"\xff\x00"],
    "!nested": lambda: [["word"]],
    "!objects": lambda: [WithoutRepr()],
    "!words-and-objects": lambda: ["never", WithoutRepr(), "written"],
    "!lone-surrogate": lambda: ["never", "\ud800"],
    "!generator": _half_a_generator,
    "!bad-iterable": NotAnIterable,
    "!bytes-result": lambda: b"never",
}


def _reason(name: str) -> str:
    return "sink_error" if name == "!nones" else "error"  # NULL is a word, and no key


def split(line: str) -> Any:
    """The topology's function."""
    return MISBEHAVE[line]() if line in MISBEHAVE else line.split()


# -- messages of text --------------------------------------------------------------------------------------------------


def _text_message(rng: random.Random) -> Made:
    match rng.randrange(8):
        case 0:
            payload = rng.randbytes(rng.randrange(200))
        case 1:
            payload = b""
        case 2:
            payload = f"a \x00{rng.randrange(9)} b".encode()
        case 3:
            payload = f"a {chr(rng.randrange(0xD800, 0xE000))} b".encode("utf-8", "surrogatepass")
        case 4:
            payload = rng.choice(list(MISBEHAVE)).encode()
        case 5:
            payload = "".join(chr(_character(rng)) for _ in range(rng.randrange(40))).encode()
        case 6:
            payload = rng.choice(
                [b"\xff\xfe", b"\xef\xbb\xbfbom", b"\xc0\x80", b"\xf4\x90\x80\x80", b"\n\r\t\v\f", b"\x1c"]
            )
        case _:
            payload = f"plain m{rng.randrange(100)}".encode()
    return _judged(payload)


def _character(rng: random.Random) -> int:
    code = rng.choice([rng.randrange(1, 0x300), rng.randrange(1, 0x11_0000), 0x10FFFF, 0xFFFE, 0x202E, 0x301, 0x1F600])
    return code if not 0xD800 <= code < 0xE000 else 0x20


def _judged(payload: bytes) -> Made:
    try:
        text = payload.decode()
    except UnicodeDecodeError:
        return Made(payload, "bad_message")
    if text in MISBEHAVE:
        return Made(payload, _reason(text))
    words = text.split()
    # Postgres holds no NUL, and no index of it such a long key; then the message is not in the Delta tables either.
    refused = any("\0" in word or len(word.encode()) > 2_600 for word in words)
    return Made(payload, "sink_error" if refused else None)


def text_messages(rng: random.Random) -> list[Made]:
    huge = [
        _judged(rng.randbytes(HUGE_BYTES)),
        _judged(b"x" * HUGE_BYTES),
        _judged(b"many words " * (HUGE_BYTES // 11)),
        _judged("".join(rng.choices("abcdefghijklmnopqrstuvwxyz0123456789", k=2_600)).encode()),  # the longest key
        _judged("".join(chr(rng.randrange(0x4E00, 0x9000)) for _ in range(2_000)).encode()),
    ]
    each = [_judged(name.encode()) for name in MISBEHAVE]
    made = [*huge, *each, *(_text_message(rng) for _ in range(MESSAGES - len(huge) - len(each)))]
    rng.shuffle(made)
    return made


def text_topology(lake: Path, database: Database) -> Topology:
    t = Topology("garbage")
    words = t.stream("lines", _queue("line string", database)).flat_map(split, "line", schema="word string")
    words.into(
        DeltaSink(lake / "words", name="delta-append"), PostgresSink("words", name="postgres-append", database=database)
    )
    words.group_by("word").persistent_aggregate(n=count()).into(
        DeltaSink(lake / "counts", name="delta-fold"), PostgresSink("counts", name="postgres-fold", database=database)
    )
    return t


def test_garbage_text_is_processed_or_a_dead_letter(database: Database, tmp_path: Path, seed: int) -> None:
    made = text_messages(random.Random(seed))
    run(text_topology(tmp_path, database), made, database, tmp_path)
    should = Counter(word for m in made if m.dies_of is None for word in m.payload.decode().split())
    assert Counter(delta(tmp_path / "words", "word")) == should
    assert Counter(postgres(database, "select word from words")) == should
    assert dict(zip(delta(tmp_path / "counts", "word"), delta(tmp_path / "counts", "n"), strict=True)) == should
    assert dict(rows(database, "select word, n from counts")) == should


# -- messages of JSON --------------------------------------------------------------------------------------------------

SCHEMA = "name string, n long not null, price double, day date, at timestamp, good boolean"


def _value(rng: random.Random, key: str) -> tuple[Any, bool]:
    """A value for a column, and whether it can be held."""
    fine: dict[str, list[Any]] = {
        "name": ["", "a", "\U0001f600", None, "a" * 1000],
        "n": [0, -1, 2**63 - 1, -(2**63)],
        "price": [0, -0.5, 1e300, None, 3],
        "day": ["2024-02-29", "0001-01-01", "9999-12-31", None],
        "at": ["2024-02-29T23:59:59.999999+00:00", "0001-01-01T00:00:00", None],
        "good": [True, False, None],
    }
    bad: dict[str, list[Any]] = {
        "name": [1, True, [], {}, "nul \x00", "\ud800", ["a"]],
        "n": [None, 2**63, -(2**63) - 1, 1.5, "1", True, [1], {}, 10**400],
        "price": ["1", True, [], {}],
        "day": ["2023-02-29", "0000-01-01", "99999-01-01", "", 7, True, "\x00", []],
        "at": ["2024-02-30T00:00:00", "never", 1, {}],
        "good": [0, 1, "true", []],
    }
    if rng.random() < 0.07:
        return rng.choice(bad[key]), False
    return rng.choice(fine[key]), True


def _json_message(rng: random.Random, number: int) -> Made:
    if rng.random() < 0.2:
        raw = rng.choice(
            [
                b"",
                b"null",
                b"[]",
                b'"text"',
                b"{",
                b'{"n":',
                b"{'n': 1}",
                b'{"n": NaN}',
                b'{"n": 1, "price": Infinity}',
                b'{"n": 1} {"n": 2}',
                b'\xef\xbb\xbf{"n": 1}',
                b'{"n": 1, "name": "\xff"}',
                b'{"n": 1, "name": "\x00"}',
                b"[" * 100_000,
                b'{"n":' * 5_000,
                b"9" * 5_000,
                b'{"n": ' + b"9" * 5_000 + b"}",
                b"\x00",
                rng.randbytes(50),
            ]
        )
        return Made(raw, "bad_message")
    values = {key: _value(rng, key) for key in ("name", "n", "price", "day", "at", "good")}
    document = {key: value for key, (value, _) in values.items()}
    document["extra"] = number  # a key that no column has
    reason = None
    if not all(good for _, good in values.values()):
        alone = [key for key, (_, good) in values.items() if not good]
        nul = alone == ["name"] and isinstance(document["name"], str) and "\x00" in document["name"]
        reason = "sink_error" if nul else "bad_message"
    return Made(json.dumps(document).encode(), reason)


def test_garbage_json_is_processed_or_a_dead_letter(database: Database, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    made = [_json_message(rng, number) for number in range(MESSAGES // 2)]
    t = Topology("garbage")
    source = _queue(SCHEMA, database)
    t.stream("lines", source).into(
        DeltaSink(tmp_path / "rows", name="delta"), PostgresSink("rows", name="postgres", database=database)
    )
    run(t, made, database, tmp_path)
    kept = [json.loads(m.payload) for m in made if m.dies_of is None]
    should = Counter((r["name"], r["n"], r["price"], r["good"]) for r in kept)
    columns = [delta(tmp_path / "rows", name) for name in ("name", "n", "price", "good")]
    assert Counter(zip(*columns, strict=True)) == should
    assert Counter(rows(database, "select name, n, price, good from rows")) == should


# -- functions that misbehave elsewhere ---------------------------------------------------------------------------------


def test_a_key_without_repr_fails_its_message_alone(database: Database, tmp_path: Path) -> None:
    """Results of several fields: dicts with strange keys, rows that are too short, a filter whose truth raises."""

    class Untrue:
        def __bool__(self) -> bool:
            raise OSError("\x00")

    def pair(line: str) -> Any:
        results: dict[str, Any] = {
            "!keys": {WithoutRepr(): 1, "b": 2},
            "!short": ("a",),
            "!object": WithoutRepr(),
            "!text": "ab",
        }
        return results.get(line, (line, len(line)))

    def keep(a: str) -> Any:
        return Untrue() if a == "!untrue" else True

    t = Topology("garbage")
    stream = t.stream("lines", _queue("line string", database))
    stream.map(pair, "line", schema="a string, b long").filter(keep, "a").into(
        DeltaSink(tmp_path / "pairs", name="delta")
    )
    bad = [b"!keys", b"!short", b"!object", b"!text", b"!untrue"]
    made = [Made(payload, "error") for payload in bad] + [Made(b"fine", None), Made(b"", None)]
    run(t, made, database, tmp_path)
    assert sorted(delta(tmp_path / "pairs", "a")) == ["", "fine"]


# -- the harness -------------------------------------------------------------------------------------------------------


def _queue(schema: str, database: Database) -> PostgresQueue:
    return PostgresQueue(
        "garbage",
        schema=schema,
        database=database,
        max_attempts=MAX_ATTEMPTS,
        backoff_base_s=0.001,
        backoff_max_s=0.001,
    )


def run(t: Topology, made: list[Made], database: Database, folder: Path) -> RunStatistics:
    """Put, run until nothing is left, and hold ledger, dead letters and audit to what must come of each message."""
    prepared_database(database)
    put(database, "garbage", [m.payload for m in made])
    settings = Settings(
        database_url=database.sqlalchemy_url.render_as_string(hide_password=False),
        home=folder / "home",
        batch_messages=2_500,
        batch_bytes=2_000_000,
    )
    with driver(t, settings=settings, engine="inline", until_idle=True, rng=random.Random(1)) as coordinator:
        statistics = coordinator.run()
    dead = Counter((m.payload, m.dies_of) for m in made if m.dies_of is not None)
    letters = rows(database, "select payload, reason from stormproof.dead_letter where disposal is null")
    assert Counter((bytes(payload), reason) for payload, reason in letters) == dead
    assert statistics.messages + len(letters) == len(made)
    assert statistics.failed == MAX_ATTEMPTS * len(letters)
    report = verified("garbage", database)
    assert report.clean, (report.violations, report.unknowns)
    assert not report.notices
    return statistics


def delta(path: Path, column: str) -> list[Any]:
    found: list[Any] = DeltaTable(str(path)).to_pyarrow_table().column(column).to_pylist()
    return found


def rows(database: Database, statement: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(database.conninfo) as connection:
        return connection.execute(statement.encode()).fetchall()


def postgres(database: Database, statement: str) -> list[Any]:
    return [row[0] for row in rows(database, statement)]
