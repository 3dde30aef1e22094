"""Every argument of a declaration, given wrongly: the error says whose it is, which one, and what to write instead."""

# Wrong types are what this is about.
# pyright: reportArgumentType=false, reportIncompatibleMethodOverride=false, reportCallIssue=false
# mypy: disable-error-code="arg-type, override, misc, dict-item, list-item, type-var, call-overload"

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from threading import Event
from typing import Any, ClassVar, Final

import pyarrow as pa
import pytest
from support.jobs import source
from support.operations import Greatest, Letters, Ranked, words_of

from stormproof import (
    ArrowBolt,
    BasicBolt,
    Bolt,
    CatalogTable,
    DeltaMap,
    DeltaSink,
    FileSource,
    IteratorSource,
    KafkaSource,
    KestrelSource,
    MemoryMap,
    MemorySink,
    MemorySource,
    NatsSource,
    PostgresMap,
    PostgresQueue,
    PostgresSink,
    RabbitMQSource,
    RabbitMQStreamSource,
    RedisStreamSource,
    Topology,
    count,
    exactly_once,
    feed,
    sum_,
)
from stormproof.core.graph.components import OutputStream
from stormproof.core.graph.topology import TopologyGraph
from stormproof.errors import StormproofError, TopologyError, UsageError
from stormproof.sink import Lineage
from stormproof.source import MicroBatches, PendingArguments, RedeliveringArguments
from stormproof.state import (
    MapSetter,
    MemoryStore,
    NonTransactionalMap,
    OpaqueMap,
    RowMerge,
    StateSink,
    TransactionalMap,
)
from stormproof.topology import Aggregator, CombinerAggregator, ReducerAggregator
from stormproof.trident.driver.run import RunArguments
from stormproof.trident.topology.stream import GroupedStream, Stream

Case = tuple[Callable[[], object], str]
"""What is called, and a pattern of what it says."""

A_NAME: Final = r"name .*use letters, digits"
SECONDS: Final = "must be a number of seconds"
KNOWN: Final = r"known: word, size"
SCHEMA: Final = r"write fields like 'word string"
STATES: Final = r"\.kind is|give one like PostgresMap"


class Split(BasicBolt):
    streams = "word string"

    def execute(self, tuple: Any, emit: Any, /) -> None: ...


class TakesMore(BasicBolt):
    streams = "word string"

    def execute(self, tuple: Any, emit: Any, more: Any, /) -> None: ...


class PreparesAlone(Bolt):
    def prepare(self) -> None: ...
    def execute(self, tuple: Any, /) -> None: ...


class NoRows(ArrowBolt):
    def execute(self) -> Any: ...


class WrongStreams(Split):
    streams: ClassVar[Any] = ["word string"]


class PairOf(CombinerAggregator):
    result = "string"

    def init(self, word: str) -> str:
        return word

    def combine(self, one: str) -> str:
        return one

    def zero(self) -> str:
        return ""


class Yields(Aggregator):
    result = "x string"

    def aggregate(self, state: Any, emit: Any, /, *values: Any) -> None: ...

    def complete(self, state: Any, emit: Any, /) -> Any:
        yield "x"


class OneLetter(ReducerAggregator):
    result = "string"

    def init(self) -> str:
        return ""

    def reduce(self, value: str, /, word: str) -> str:
        return value


class BadType(CombinerAggregator):
    result = "lng"

    def init(self, *values: Any, **_: Any) -> object: ...
    def combine(self, one: Any, other: Any, /) -> object: ...
    def zero(self) -> object: ...


class UpdatesAlone:
    def update(self, state: Any) -> None: ...


class OddKind(MemoryMap):
    @property
    def kind(self) -> Any:
        return "sometimes"


def two(a: object, b: object) -> list[object]:
    return [a, b]


def by_name(word: object, *, size: object) -> object:
    return word, size


def topology() -> Topology:
    return Topology("t")


def words(t: Topology | None = None) -> Stream:
    """Fields word and size, given by a component called len."""
    return words_of(t or topology(), source()).each(len, "word", schema="size long")


def grouped() -> GroupedStream:
    return words().group_by("word")


def bolt(*args: Any, **options: Any) -> object:
    t = topology()
    made = words(t).output
    given = [made.shuffle()] if len(args) < 3 else list(args[2:])
    return t.bolt(*args[:2], *given, **options)


def subscribed(how: Callable[[OutputStream], Any]) -> object:
    t = topology()
    return t.bolt("b", Split(), how(words(t).output))


def joined(how: Callable[[Topology, Stream, Stream], object]) -> object:
    t = topology()
    w = words(t)
    return how(t, w, w.project("word", other="size"))


def compiled(stream: Stream) -> object:
    return stream.into(MemorySink("out")).topology.explain()


def kept(**options: Any) -> object:
    return words().persistent_aggregate(n=count(), **options)


def kept_by_key(**options: Any) -> object:
    return grouped().persistent_aggregate(n=count(), **options)


def of_function(operation: str, **schema: Any) -> Mapping[str, Sequence[Case]]:
    """What holds of every operation that calls a function for each tuple."""

    def call(*args: Any, **options: Any) -> Callable[[], object]:
        return lambda: getattr(words(), operation)(*args, **{**schema, **options})

    function = r"test_wrong_arguments.py:\d+\)"
    cases: dict[str, Sequence[Case]] = {
        "function": [
            (
                call("len"),
                r"component '\w+': \w+ needs a function, got 'len'; write one that takes fields, like f\(word, size",
            ),
            (call(None, "word"), "needs a function, got None"),
            (call(Split(), "word"), r"needs a function, got Split\(...\)"),
            (
                call(two, "word"),
                rf"component 'two': function two \({function} gets 1 value: word; it takes 2 values: a, b; ",
            ),
            (
                call(lambda a: a),
                r"function <lambda> .* gets 2 values: word, size; it takes 1 value: a; it gets all fields",
            ),
            (call(by_name, "word"), "it takes 1 value: word, and size by name, which nothing gives; change its"),
            (call(functools.partial(two, 1, 2), "word"), "function two .* gets 1 value: word; it takes no values"),
        ],
        "concurrency": [
            (call(two, concurrency=w), r"concurrency is .*; it must be a whole number, 1 to 1024")
            for w in (0, 1_025, 1.5, "16", True)
        ],
        "fields": [
            (call(len, "wrd"), f"component 'len-2': unknown field 'wrd'; {KNOWN}"),
            (call(len, ["word"]), rf"component 'len-2': \['word'\] is no field's name; give names one by one.*{KNOWN}"),
            (call(len, 3), "component 'len-2': 3 is no field's name"),
            (call(len, ""), "unknown field ''"),
            (call(two, "word", "word"), "component 'two': field 'word' stands twice"),
        ],
        "name": [(call(len, "word", name=wrong), A_NAME) for wrong in ("", "a b", 3)],
    }
    if schema:
        cases["schema"] = [
            (call(len, "word", schema=None), "component 'len-2' needs a schema, .* like schema='word string, n long'"),
            (call(len, "word", schema=""), f"component 'len-2': .*{SCHEMA}"),
            (call(len, "word", schema="n lng"), "component 'len-2': schema 'n lng' can't be read; write"),
            (call(len, "word", schema=["n long"]), f"component 'len-2': schema is .*{SCHEMA}"),
            (
                call(len, "word", schema="n long, n long"),
                "component 'len-2': schema names a field twice: 'n' and 'n'; give",
            ),
        ]
    return cases


def of_aggregates(begin: Callable[[], Any], method: str) -> Mapping[str, Sequence[Case]]:
    """What holds of every method that takes aggregates."""

    def call(*args: Any, **options: Any) -> Callable[[], object]:
        return lambda: getattr(begin(), method)(*args, **options)

    behind = r"aggregate behind '\w+'"
    return {
        "several": [
            (
                call(count()),
                rf"{behind}: .*only an Aggregator stands without a name; write result=..., as in n=count\(\)",
            ),
            (call(Ranked), rf"{behind}: the class Ranked: only an Aggregator stands"),
            (call(Ranked().over("wrd")), "component 'aggregate': unknown field 'wrd'; known: word"),
            (
                call(Ranked().over("word", "size")),
                r"Ranked.aggregate .* gets 4 values: state, emit, word, size; it takes 3",
            ),
            (call(Yields().over("word")), "Yields.complete is a generator function.*; call emit for each row"),
        ],
        "results": [
            (call(), "component 'aggregate': no results; name one like"),
            (call(n=count), rf"{behind}: n=the function count is no aggregate; write count\(\)"),
            (
                call(n=Greatest),
                rf"{behind}: n=the class Greatest is no aggregate; give an object of it, Greatest\(...\)",
            ),
            (call(n=Ranked()), rf"{behind}: n=Ranked: .*give it without a name"),
            (call(n=sum_("wrd")), "component 'aggregate': n sums the unknown field 'wrd'; known: word"),
            (call(n=sum_(None)), "n sums the unknown field None; known: word"),
            (call(n=sum_("word")), "component 'aggregate': field 'word' is string, which has no sum"),
            (call(n=BadType()), rf"{behind}: BadType.result: schema .*{SCHEMA}"),
            (
                call(n=PairOf().over("word")),
                "PairOf.combine .* gets 2 values: one, other; it takes 1 value: one; change",
            ),
            (call(g=Greatest()), r"Greatest.init .* gets 2 values: word, size; .*as in Greatest\(\).over\('field'\)"),
            (
                call(r=OneLetter()),
                r"OneLetter.reduce .* gets 3 values: value, word, size; it takes 2 values: value, word;",
            ),
        ],
        "name": [(call(n=count(), name=wrong), A_NAME) for wrong in ("", "a b", 3)],
    }


def of_state(keep: Callable[..., object]) -> Mapping[str, Sequence[Case]]:
    def call(**options: Any) -> Callable[[], object]:
        return lambda: keep(**options)

    after = "persistent_aggregate after 'len'"
    return {
        "state": [
            (
                call(state=MemoryMap),
                rf"{after}: the class MemoryMap is no state; give an object of it, MemoryMap\(...\)",
            ),
            (
                call(state=PostgresSink("x")),
                rf"{after}: PostgresSink\(...\) is no state; it is a sink: .*\.into\(...\)",
            ),
            (call(state="totals"), rf"{after}: 'totals' is no state; give one like PostgresMap\('totals'\)"),
            (call(state=StateSink("s", MemoryMap())), r"StateSink\(...\) is no state; it is a sink"),
            (call(state=OddKind()), f"{after}: OddKind.kind is 'sometimes'; it must be one of non-transactional"),
        ],
        "state_name": [
            (call(state_name="totals"), f"{after}: state_name='totals' names no state; pass state="),
            (call(state=MemoryMap(), state_name="a b"), f"{after}: state_name: {A_NAME}"),
            (call(state=MemoryMap(), state_name=""), A_NAME),
        ],
    }


LETTERS = r"it must be (a list with one for each message|an iterable of payloads)"


def backoffs(make: Callable[..., object], where: str) -> dict[str, Sequence[Case]]:
    """The two seconds of a source's retries."""
    return {
        name: [(lambda n=name, w=w: make(**{n: w}), f"{where}: {name} is .*{SECONDS}") for w in (-1, "1", float("nan"))]
        for name in ("backoff_base_s", "backoff_max_s")
    }


ATTEMPTS = "max_attempts is .*; it must be a whole number, at least 1"

TOPOLOGY: Final[Mapping[str, Mapping[str, Sequence[Case]]]] = {
    "Topology.__init__": {
        "name": [(lambda w=w: Topology(w), f"topology {A_NAME}") for w in ("", "a b", "a/b", 3, None)],
        "guarantee": [(lambda: Topology("t", "twice"), "topology 't': no guarantee 'twice'; known: at-most-once")],
        "ackers": [
            (lambda w=w: Topology("t", ackers=w), "topology 't': ackers is .*; use 1 or more, or 0")
            for w in (-1, "3", 1.5, True)
        ],
        "message_timeout_s": [
            (lambda w=w: Topology("t", message_timeout_s=w), f"topology 't': message_timeout_s is .*{SECONDS}")
            for w in (0, -1, "3", float("nan"), True)
        ],
    },
    "Topology.stream": {
        "name": [(lambda w=w: topology().stream(w, source()), f"spout {A_NAME}") for w in ("", "a b", 3)],
        "source": [
            (lambda: topology().stream("s", "lines"), "spout 's': 'lines' is no source; give one like"),
            (lambda: topology().stream("s", None), "spout 's': None is no source"),
            (lambda: topology().stream("s", MemorySource), "the class MemorySource is no source; give an object of it"),
            (lambda: topology().stream("s", MemorySink("x")), r"MemorySink\(...\) is no source"),
        ],
    },
    "Topology.spout": {
        "name": [(lambda: topology().spout("a b", source()), f"spout {A_NAME}")],
        "source": [(lambda: topology().spout("s", b"lines"), "spout 's': b'lines' is no source")],
    },
    "Topology.bolt": {
        "name": [(lambda w=w: bolt(w, Split()), f"bolt {A_NAME}") for w in ("", "a b", 3, None)],
        "bolt": [
            (lambda: bolt("b", 3, schema="a int"), "bolt 'b': 3 is no bolt; give a function, or an object of a Bolt"),
            (lambda: bolt("b", Split), r"bolt 'b': Split is a class; give an object of it: Split\(\)"),
            (
                lambda: bolt("b", len, schema="n int"),
                "bolt 'b': function len gets 2 values: word, size; it takes 1 value",
            ),
            (
                lambda: bolt("b", TakesMore()),
                r"bolt 'b': function TakesMore.execute .* gets 2 values: tuple, emit; it takes 3",
            ),
            (
                lambda: bolt("b", PreparesAlone()),
                "PreparesAlone.prepare .* gets 2 values: context, collector; it takes no",
            ),
            (
                lambda: bolt("b", NoRows()),
                "NoRows.execute .* gets 1 value: rows; it takes no values; change its parameters",
            ),
            (lambda: bolt("b", WrongStreams()), rf"bolt 'b': schema is \['word string'\]; {SCHEMA}"),
        ],
        "inputs": [
            (lambda: topology().bolt("b", Split()), "bolt 'b' has no input; name one like"),
            (lambda: bolt("b", Split(), "split"), r"bolt 'b': 'split' is no output stream; write words.shuffle\(\)"),
            (lambda: bolt("b", Split(), words()), "Stream.* is no output stream; .* with the output of this stream"),
            (
                lambda: bolt("b", Split(), words().output),
                "bolt 'b': 'len' belongs to topology 't', which is another one",
            ),
            (
                lambda: bolt("b", Split(), words().output.shuffle()),
                "'len' belongs to topology 't', which is another one",
            ),
            (
                lambda: subscribed(lambda o: o.fields("wrd")),
                f"component 'b', fields grouping: unknown field 'wrd'; {KNOWN}",
            ),
        ],
        "schema": [
            (lambda: bolt("b", two), "bolt 'b': a function has the one output stream 'default'; say what it gives"),
            (lambda: bolt("b", two, schema="a"), f"component 'b': .*{SCHEMA}|component 'b': schema 'a'"),
            (lambda: bolt("b", Split(), schema=3), f"bolt 'b': schema is 3; {SCHEMA}"),
            (
                lambda: bolt("b", Split(), schema="a int", streams={"default": "b int"}),
                "both say what stream 'default' gives",
            ),
        ],
        "streams": [
            (lambda: bolt("b", two, schema="a int", streams={}), "bolt 'b': a function has the one output stream"),
            (
                lambda: bolt("b", Split(), streams="a int"),
                r"bolt 'b': streams is 'a int'; it must be a mapping, like \{'late'",
            ),
            (lambda: bolt("b", Split(), streams={"a b": "a int"}), f"bolt 'b': stream {A_NAME}"),
            (lambda: bolt("b", Split(), streams={"late": "a it"}), "bolt 'b', stream 'late': schema 'a it' .*; write"),
            (lambda: bolt("b", Split(), streams={"late": None}), "bolt 'b', stream 'late' needs a schema"),
        ],
    },
    "Topology.sink": {
        "sink": [
            (
                lambda: joined(lambda t, w, _: t.sink("table", w.output)),
                r"topology 't': 'table' is no sink; give one like",
            ),
            (
                lambda: joined(lambda t, w, _: t.sink(MemorySink, w.output)),
                "the class MemorySink is no sink; give an object",
            ),
        ],
        "stream": [
            (lambda: topology().sink(MemorySink("o"), "len"), "sink 'o': 'len' is no output stream; a sink takes one"),
            (
                lambda: topology().sink(MemorySink("o"), words().output),
                "sink 'o': 'len' belongs to topology 't', which is",
            ),
        ],
    },
    "Topology.following": {
        "output": [
            (lambda: topology().following("len"), r"topology 't': following\(\) .* got 'len'; give what t.bolt"),
            (
                lambda: topology().following(words().output),
                r"following\(\): 'len' belongs to topology 't', which is another",
            ),
        ]
    },
    "Topology.merge": {
        "streams": [
            (lambda: topology().merge(words()), "topology 't': merge needs at least two streams, got 1"),
            (
                lambda: joined(lambda t, w, _: t.merge(w, "len")),
                "topology 't': merge of 'len', which is no stream; give a",
            ),
            (lambda: joined(lambda t, w, _: t.merge(w, w.output)), r"no stream; make it one with t.following"),
            (lambda: joined(lambda t, w, _: t.merge(w, w.group_by("word"))), r"no stream; finish its groups with .agg"),
            (lambda: joined(lambda t, w, o: t.merge(w, o)), "component 'merge': its inputs have different fields"),
            (
                lambda: joined(lambda t, w, _: t.merge(w, words())),
                "belongs to topology 't', not to 't': begin both in one",
            ),
        ],
        "name": [(lambda: joined(lambda t, w, _: t.merge(w, w, name="a b")), A_NAME)],
    },
    "Topology.join": {
        "left": [
            (lambda: joined(lambda t, w, o: t.join("len", o, "word")), "join of 'len', which is no stream; give a")
        ],
        "right": [
            (lambda: joined(lambda t, w, o: t.join(w, None, "word")), "join of None, which is no stream; give a")
        ],
        "on": [
            (
                lambda w=w: joined(lambda t, a, b: t.join(a, b, w)),
                r"join of 'len' and 'project': on names .*give the keys' n",
            )
            for w in (3, None, [3], [["word"]], {"word": 3})
        ]
        + [
            (
                lambda: joined(lambda t, a, b: t.join(a, b, [])),
                f"component 'join': a join needs at least one key; {KNOWN}",
            ),
            (
                lambda: joined(lambda t, a, b: t.join(a, b, "size")),
                "right side: unknown field 'size'; known: word, other",
            ),
            (
                lambda: joined(lambda t, a, b: t.join(a, b, ["word", "word"])),
                "on names a key twice: word, word; name each",
            ),
            (
                lambda: joined(lambda t, a, b: t.join(a, b, {"word": "word", "size": "word"})),
                "right side: field 'word' stands twice",
            ),
        ],
        "how": [
            (
                lambda w=w: joined(lambda t, a, b: t.join(a, b, "word", how=w)),
                "component 'join': no join .*; known: inner, left",
            )
            for w in ("outer", None, "", 3)
        ],
        "name": [(lambda: joined(lambda t, a, b: t.join(a, b, "word", name="a b")), A_NAME)],
    },
    "Topology.explain": {
        "guarantee": [(lambda: words().topology.explain("twice"), "topology 't': no guarantee 'twice'; known: at-m")],
    },
    "Topology.dry_run": {
        "guarantee": [(lambda: words().topology.dry_run("twice"), "topology 't': no guarantee 'twice'; known: at-m")],
    },
    "Topology.run": {
        "guarantee": [(lambda: words().topology.run("twice"), "topology 't': no guarantee 'twice'; known: at-m")],
        "engine": [
            (lambda w=w: run_with(w), r"no engine .*; known: 'spark', 'inline', or an object such as")
            for w in ("inlin", None, 3, MemorySink)
        ],
        "metrics_port": [
            (lambda w=w: run_with("inline", metrics_port=w), r"argument metrics_port: .* is no port: 0 to 65535")
            for w in (-1, 65_536, "9400", 1.5, True)
        ],
        "stop": [
            (lambda w=w: run_with("inline", stop=w), r"argument stop: .* is no threading.Event")
            for w in (3, "now", Event)
        ],
        "accept_change": [
            (lambda w=w: run_with("inline", accept_change=w), r"argument accept_change: .* is no fingerprint")
            for w in (3, True, b"0123456789ab")
        ],
    },
    "Topology.foreach_batch": {
        "guarantee": [
            (lambda: words().topology.foreach_batch("twice"), "topology 't': no guarantee 'twice'; known: at-m"),
            (words().topology.foreach_batch, "topology 't' is fed .*only where its one source is a Micro"),
        ],
    },
    "Stream.map": of_function("map", schema="n long"),
    "Stream.flat_map": of_function("flat_map", schema="n long"),
    "Stream.each": of_function("each", schema="n long"),
    "Stream.filter": of_function("filter"),
    "Stream.peek": of_function("peek"),
    "Stream.project": {
        "fields": [
            (lambda: words().project(), f"component 'len': project needs at least one field; {KNOWN}"),
            (lambda: words().project("wrd"), f"project after 'len': unknown field 'wrd'; {KNOWN}"),
            (
                lambda: words().project(["word"]),
                r"project after 'len': \['word'\] is no field's name; give names one by one",
            ),
            (
                lambda: words().project("word", "word"),
                "project after 'len': schema names a field twice: 'word' and 'word'; give",
            ),
        ],
        "renamed": [
            (lambda: words().project(a="wrd"), f"project after 'len': unknown field 'wrd'; {KNOWN}"),
            (lambda: words().project(a=3), "project after 'len': 3 is no field's name"),
            (lambda: words().project(**{"": "word"}), "project after 'len': schema has a field without a name; write"),
        ],
        "name": [(lambda: words().project("word", name="a b"), A_NAME)],
    },
    "Stream.arrow": {
        "function": [
            (lambda: words().arrow(3, schema="n int"), "component 'arrow': arrow needs a function, got 3; write one"),
            (
                lambda: words().arrow(two, schema="n int"),
                "component 'two': .*gets 1 value: rows; .*write one that takes a record",
            ),
        ],
        "fields": [
            (lambda: words().arrow(len, "wrd", schema="n int"), f"component 'len-2': unknown field 'wrd'; {KNOWN}")
        ],
        "schema": [(lambda: words().arrow(len, schema=None), "component 'len-2' needs a schema")],
        "name": [(lambda: words().arrow(len, schema="n int", name="a b"), A_NAME)],
    },
    "Stream.partition_by": {
        "fields": [
            (lambda: words().partition_by(), f"component 'len', fields grouping: name at least one field; {KNOWN}"),
            (lambda: words().partition_by("wrd"), f"component 'len', fields grouping: unknown field 'wrd'; {KNOWN}"),
            (
                lambda: words().partition_by(["word"]),
                r"component 'len', fields grouping: \[.*\] is no field's name",
            ),
            (
                lambda: words().partition_by("word", "word"),
                "component 'len', fields grouping: field 'word' stands twice",
            ),
        ]
    },
    "Stream.partition": {
        "function": [
            (lambda: words().partition(3), "component 'len', custom grouping: it needs a function of the rows and"),
            (
                lambda: words().partition(len),
                r"custom grouping: function len gets 2 values: rows, tasks; .*f\(rows, tasks\)",
            ),
        ]
    },
    "Stream.parallelism": {
        "tasks": [
            (lambda w=w: words().shuffle().parallelism(w), "component 'len': parallelism is .*; use 1 to 1024")
            for w in (0, -1, "3", 1.5, None, True, 1025)
        ]
    },
    "Stream.group_by": {
        "fields": [
            (lambda: words().group_by(), f"component 'len': group_by needs at least one field; {KNOWN}"),
            (lambda: words().group_by("wrd"), f"group_by after 'len': unknown field 'wrd'; {KNOWN}"),
            (
                lambda: words().group_by(["word"]),
                r"group_by after 'len': \['word'\] is no field's name; give names one by",
            ),
            (
                lambda: words().group_by("word", "word").agg(n=count()),
                "component 'aggregate': field 'word' stands twice",
            ),
        ]
    },
    "Stream.partition_aggregate": of_aggregates(words, "partition_aggregate"),
    "Stream.aggregate": of_aggregates(words, "aggregate"),
    "Stream.persistent_aggregate": {**of_aggregates(words, "persistent_aggregate"), **of_state(kept)},
    "Stream.merge": {
        "others": [(lambda: words().merge("len"), "topology 't': merge of 'len', which is no stream; give a Stream")],
        "name": [(lambda: joined(lambda t, w, _: w.merge(w, name="a b")), A_NAME)],
    },
    "Stream.join": {
        "right": [
            (lambda: words().join("len", "word"), "topology 't': join of 'len', which is no stream; give a Stream")
        ],
        "on": [(lambda: joined(lambda t, a, b: a.join(b, None)), "on names None; give the keys' names")],
        "how": [(lambda: joined(lambda t, a, b: a.join(b, "word", how="outer")), "no join 'outer'; known: inner")],
        "name": [(lambda: joined(lambda t, a, b: a.join(b, "word", name="a b")), A_NAME)],
    },
    "Stream.into": {
        "sinks": [
            (lambda: words().into(), r"component 'len': into\(\) needs at least one sink"),
            (lambda: words().into("table"), "component 'len': 'table' is no sink; give one like DeltaSink"),
            (lambda: words().into(None), "component 'len': None is no sink"),
            (lambda: words().into([MemorySink("o")]), r"component 'len': \[.* is no sink; give them one by one"),
            (
                lambda: words().into(PostgresSink),
                r"the class PostgresSink is no sink; give an object of it, PostgresSink",
            ),
            (lambda: words().into(PostgresMap("x")), r"PostgresMap\(...\) is no sink; it is a state: .*StateSink\("),
            (lambda: words().into(OpaqueMap(MemoryStore, name="x")), "is no sink; it is a state"),
            (lambda: words().into(source()), "is no sink; give one like"),
            (lambda: words().into(MemorySink("a b")), f"sink {A_NAME}"),
            (lambda: words().into(MemorySink(3)), f"sink {A_NAME}"),
        ]
    },
    "Stream.state_query": {
        "state": [
            (
                lambda: compiled(words().state_query("seen", "word", schema="n long")),
                "component 'state' reads the state 'seen'",
            ),
            (
                lambda: words().state_query(MemoryMap(), "word", schema="n long"),
                r"state_query after 'len': state is MemoryMap\(...\); give the name that the state has",
            ),
        ],
        "fields": [
            (
                lambda: words().state_query("seen", schema="n long"),
                rf"state_query after 'len': it names no fields; .*state 'seen'.*state_query\('seen', 'word', ...\); {KNOWN}",
            ),
            (
                lambda: words().state_query("s", "wrd", schema="n long"),
                f"state_query after 'len': unknown field 'wrd'; {KNOWN}",
            ),
            (lambda: words().state_query("s", ["word"], schema="n long"), "is no field's name; give names one by one"),
        ],
        "schema": [
            (lambda: words().state_query("s", "word", schema=None), "state_query after 'len' needs a schema"),
            (
                lambda: words().state_query("s", "word", schema="n lng"),
                "state_query after 'len': schema 'n lng' .*; write",
            ),
            (
                lambda: words().state_query("s", "word", schema="word long"),
                "component 'state': field 'word' stands twice",
            ),
        ],
        "query": [
            (
                lambda: words().state_query("s", "word", schema="n long", query=3),
                r"state_query after 'len': query is 3; it must be a function query\(state, keys\)",
            ),
            (
                lambda: words().state_query("s", "word", schema="n long", query=len),
                r"state_query after 'len': function len gets 2 values: state, keys; .* write one like query\(state, keys\)",
            ),
        ],
        "name": [(lambda: words().state_query("s", "word", schema="n long", name="a b"), A_NAME)],
    },
    "Stream.new_values_stream": {
        "name": [
            (lambda: words().new_values_stream(), "component 'len' has no new values: it is no persistent_aggregate"),
            (
                lambda: grouped().persistent_aggregate(n=count(), state=MemoryMap()).new_values_stream(name="a b"),
                A_NAME,
            ),
        ]
    },
    "Stream.partition_persist": {
        "name": [(lambda: words().partition_persist("a b", MemoryMap(), MapSetter(), keys=["word"]), f"sink {A_NAME}")],
        "state": [
            (lambda: words().partition_persist("s", MemoryMap, MapSetter()), "state 's': the class MemoryMap is no")
        ],
        "updater": [
            (
                lambda: words().partition_persist("s", MemoryMap(), None),
                "state 's': updater is None; give an object with up",
            ),
            (
                lambda: words().partition_persist("s", MemoryMap(), MapSetter),
                "updater is the class MapSetter; give an object",
            ),
            (
                lambda: words().partition_persist("s", MemoryMap(), UpdatesAlone()),
                "state 's': updater: function UpdatesAlone.update .* gets 2 values: state, rows; it takes 1 value: state",
            ),
        ],
        "keys": [
            (
                lambda: words().partition_persist("s", MemoryMap(), MapSetter(), keys="word"),
                r"keys is 'word'; .*keys=\['word'\]",
            ),
            (
                lambda: words().partition_persist("s", MemoryMap(), MapSetter(), keys=[3]),
                r"state 's': keys is \[3\]; give",
            ),
            (
                lambda: words().partition_persist("s", MemoryMap(), MapSetter(), keys=["w"]),
                "state 's': no column 'w'; there",
            ),
        ],
    },
    "GroupedStream.parallelism": {
        "tasks": [(lambda: grouped().parallelism(0), "component 'len': parallelism is 0; use 1 to 1024")],
    },
    "GroupedStream.agg": of_aggregates(grouped, "agg"),
    "GroupedStream.aggregate": of_aggregates(grouped, "aggregate"),
    "GroupedStream.partition_aggregate": of_aggregates(grouped, "partition_aggregate"),
    "GroupedStream.persistent_aggregate": {**of_aggregates(grouped, "persistent_aggregate"), **of_state(kept_by_key)},
    "OutputStream.__getitem__": {
        "stream": [(lambda: words().output["late"], "component 'len' has no output stream 'late'; known: default")],
    },
    "OutputStream.fields": {
        "fields": [
            (
                lambda: subscribed(lambda o: o.fields()),
                f"component 'b', fields grouping: name at least one field; {KNOWN}",
            ),
            (lambda: subscribed(lambda o: o.fields(3)), "component 'b', fields grouping: 3 is no field's name"),
        ]
    },
    "OutputStream.partial_key": {
        "fields": [
            (lambda: subscribed(lambda o: o.partial_key("w")), "component 'b', partial_key grouping: unknown field 'w'")
        ],
    },
    "OutputStream.custom": {
        "function": [
            (
                lambda: subscribed(lambda o: o.custom("f")),
                "component 'b', custom grouping: it needs a function of the rows",
            ),
            (
                lambda: subscribed(lambda o: o.custom(lambda rows: rows)),
                "component 'b', custom grouping: .*gets 2 values: rows, t",
            ),
        ]
    },
}

COLUMNS_WRONG: Final[Sequence[object]] = ("", 3, [], [3], ["k", "k"], len)
UPSERT: Final = {"mode": "upsert", "key": "k", "order_by": "v"}


def rules(sink: type) -> dict[str, list[Case]]:
    """The arguments of what becomes of a sink's rows, which all sinks have."""

    def made(**wrong: object) -> Callable[[], object]:
        return lambda: sink("x", **{**UPSERT, **wrong})

    return {
        "mode": [(made(mode=w), "mode=.* is none; use 'append', 'upsert', 'fold'") for w in ("", 3, "insert", len)],
        **{
            name: [
                (made(**{name: w}), f"'x'.*: {name}=.* names (no columns; give|'k' twice; leave)")
                for w in COLUMNS_WRONG
            ]
            for name in ("key", "order_by", "keep")
        },
        "lineage": [
            (made(lineage=w), "'x'.*: lineage(=.*: use True, or Lineage|: .* is no column's name|: name one or two)")
            for w in ("", 3, None, len, Lineage, Lineage(None, None), Lineage("a", "A"), Lineage(""), Lineage("a", len))
        ],
        "delete_when": [
            (made(delete_when=w), "delete_when=.* is no column's name; name a") for w in ("", 3, ["d"], len)
        ],
    }


def contracts(sink: type) -> list[Case]:
    return [
        (lambda w=w: sink("x", schema_contract=w), "schema_contract=.* is none of 'freeze', 'evolve'")
        for w in ("", 3, None, "thaw", len)
    ]


def _journalled(kind: Callable[..., object], noun: str, forms: str) -> dict[str, list[Case]]:
    """Of sources whose ids are those of publishers."""
    return {
        "id_from": [
            (lambda w=w: kind("s", id_from=w), f"{noun} s: id_from is .*; it (is {forms}|must be text)")
            for w in ("id", "field:", 7)
        ],
        "prefetch": [(lambda: kind("s", prefetch=0), f"{noun} s: prefetch is 0; it must be a whole number")],
        "horizon_s": [(lambda: kind("s", horizon_s=-1), f"{noun} s: horizon_s is -1; it {SECONDS}")],
    }


THINGS: Final[Mapping[type, Mapping[str, Sequence[Case]]]] = {
    MemorySource: {
        "name": [
            (lambda w=w: MemorySource(w), "source: name is .*; it must be text, such as 'lines'") for w in ("", 3)
        ],
        "payloads": [
            (lambda w=w: MemorySource("s", w), f"source s: payload.*{LETTERS}|must be bytes")
            for w in ("ab", b"a", 3, [3])
        ],
        "schema": [
            (lambda w=w: MemorySource("s", schema=w), f"source s: .*{SCHEMA}|source s: schema names .* twice.*; give")
            for w in ("", "a strng", None, "a string, a int")
        ],
        "unit": [(lambda: MemorySource("s", unit="rows"), "source s: no message unit 'rows'; it is 'lines'")],
        "max_attempts": [
            (lambda w=w: MemorySource("s", max_attempts=w), f"source s: {ATTEMPTS}") for w in (0, "5", 1.5, True)
        ],
        **backoffs(lambda **given: MemorySource("s", **given), "source s"),
    },
    IteratorSource: {
        "name": [(lambda: IteratorSource("", []), "source: name is ''; it must be text, such as 'lines'")],
        "items": [
            (lambda: IteratorSource("s", 3), f"source s: items is 3; {LETTERS}"),
            (lambda: IteratorSource("s", "abc"), f"source s: items is 'abc'; {LETTERS}"),
            (
                lambda: IteratorSource("s", two),
                "source s: items: function two .* gets no values; it takes 2 values: a, b; write",
            ),
        ],
        "schema": [(lambda: IteratorSource("s", [], schema="a strng"), f"source s: .*{SCHEMA}")],
        "unit": [(lambda: IteratorSource("s", [], unit="rows"), "source s: no message unit 'rows'; it is 'lines'")],
        "confirm": [
            (
                lambda: IteratorSource("s", [], confirm=3),
                r"source s: confirm is 3; it must be a function, called as confirm\(",
            ),
            (
                lambda: IteratorSource("s", [], confirm=two),
                "source s: confirm: function two .* gets 1 value: ids; it takes 2",
            ),
        ],
        "abort": [
            (lambda: IteratorSource("s", [], abort="no"), "source s: abort is 'no'; it must be a function, called as")
        ],
        "max_attempts": [(lambda: IteratorSource("s", [], max_attempts=0), f"source s: {ATTEMPTS}")],
        **backoffs(lambda **given: IteratorSource("s", [], **given), "source s"),
    },
    PostgresQueue: {
        "queue": [
            (lambda w=w: PostgresQueue(w), "queue .*: a queue's name is 1 to 40 letters") for w in ("", "a b", 3, None)
        ],
        "schema": [(lambda: PostgresQueue("q", "a strng"), f"queue q: .*{SCHEMA}")],
        "unit": [(lambda: PostgresQueue("q", unit="rows"), "queue q: no message unit 'rows'; it is 'lines'")],
        "name": [(lambda: PostgresQueue("q", name=3), "queue q: name is 3; it must be text, such as")],
        "database": [
            (
                lambda: PostgresQueue("q", database="lines"),
                "queue q: database is not a Postgres URL: it must begin with",
            ),
            (
                lambda: PostgresQueue("q", database=3),
                "queue q: database is a int; it must be a URL, as in postgresql://",
            ),
        ],
        "start": [(lambda: PostgresQueue("q", start="first"), "queue q: start is 'first'; it must be 'earliest' or")],
        "max_attempts": [(lambda w=w: PostgresQueue("q", max_attempts=w), f"queue q: {ATTEMPTS}") for w in (0, "5")],
        **backoffs(lambda **given: PostgresQueue("q", **given), "queue q"),
        "partition_messages": [
            (lambda: PostgresQueue("q", partition_messages=1), "queue q: partition_messages is 1; .*at least 2")
        ],
    },
    KafkaSource: {
        "topics": [
            (
                lambda w=w: KafkaSource(w, servers="x:1"),
                "Kafka source: topics is .*; it must be a topic, a list of topics",
            )
            for w in ("", 3, [], ["a", 3])
        ]
        + [(lambda: KafkaSource("^(", servers="x:1"), r"topics has the pattern '\^\(', which cannot be read")],
        "servers": [
            (lambda: KafkaSource("t", servers=""), "source t: servers is ''; it must be text, such as 'localhost:9092'")
        ],
        "schema": [(lambda: KafkaSource("t", servers="x:1", schema="a strng"), f"source t: .*{SCHEMA}")],
        "start": [
            (
                lambda w=w: KafkaSource("t", servers="x:1", start=w),
                "source t: start is .*; it is 'earliest', 'latest', a time",
            )
            for w in ("begin", 3, {}, {0: -1}, {"t": 3})
        ]
        + [(lambda: KafkaSource("t", servers="x:1", start=datetime(2026, 1, 1)), "without a time zone")],  # noqa: DTZ001
        "unit": [(lambda: KafkaSource("t", servers="x:1", unit="rows"), "source t: no message unit 'rows'")],
        "metadata": [
            (
                lambda: KafkaSource("t", servers="x:1", metadata=("offst",)),
                "source t: no metadata 'offst'; known: topic",
            ),
            (
                lambda: KafkaSource("t", servers="x:1", metadata="key"),
                "source t: metadata is 'key'; it is a tuple of names",
            ),
            (
                lambda: KafkaSource("t", servers="x:1", schema="key string", metadata=("key",)),
                "field 'key' is there already; name the metadata's field: metadata={'key': 'message_key'}",
            ),
        ],
        "isolation": [
            (
                lambda: KafkaSource("t", servers="x:1", isolation="none"),
                "isolation is 'none'; it must be 'read_committed' or",
            )
        ],
        "on_gap": [
            (lambda: KafkaSource("t", servers="x:1", on_gap="skip"), "on_gap is 'skip'; it must be 'fail' or 'rec")
        ],
        "group": [(lambda: KafkaSource("t", servers="x:1", group=3), "source t: group is 3; it must be text")],
        "client": [
            (
                lambda: KafkaSource("t", servers="x:1", client="x"),
                "source t: client is str; it is a mapping such as",
            ),
            (
                lambda: KafkaSource("t", servers="x:1", client={"auto.offset.reset": "latest"}),
                "setting 'auto.offset.reset' of client is decided by the argument 'start'",
            ),
        ],
        "name": [
            (lambda: KafkaSource("t", servers="x:1", name=3), "Kafka source: name is 3; it must be text, such as")
        ],
        "database": [
            (lambda: KafkaSource("t", servers="x:1", database="x"), "source t: database is not a Postgres URL")
        ],
        "max_attempts": [(lambda: KafkaSource("t", servers="x:1", max_attempts=0), f"source t: {ATTEMPTS}")],
        **{
            name: [
                (lambda n=name, w=w: KafkaSource("t", servers="x:1", **{n: w}), f"source t: {name} is .*{SECONDS}")
                for w in (-1, "1")
            ]
            for name in ("look_interval_s", "answer_s")
        },
        **backoffs(lambda **given: KafkaSource("t", servers="x:1", **given), "source t"),
    },
    **{
        kind: {
            "stream": [
                (lambda w=w, k=kind: k(w), f"{noun}: stream is .*; it must be text, such as") for w in ("", 3, None)
            ],
            **{
                name: [(lambda n=name, k=kind: k("s", **{n: 3}), f"{noun} s: {name} is 3; it must be text, such as")]
                for name in ("url", "name", *texts)
            },
            "schema": [(lambda k=kind: k("s", schema="a strng"), f"{noun} s: .*{SCHEMA}")],
            "unit": [(lambda k=kind: k("s", unit="rows"), f"{noun} s: no message unit 'rows'; it is 'lines'")],
            "metadata": [(lambda k=kind: k("s", metadata=("x",)), f"{noun} s: no metadata 'x'; known: ")],
            **{
                name: [
                    (
                        lambda n=name, w=w, k=kind: k("s", **{n: w}),
                        rf"{noun} s: {name} is .*; it must be '\w+'( or '\w+')+$",
                    )
                    for w in ("first", 3)
                ]
                for name in ("start", "on_gap", "on_new_stream")
            },
            "database": [
                (lambda k=kind: k("s", database="x"), f"{noun} s: database is not a Postgres URL: it must begin with")
            ],
            "max_attempts": [(lambda k=kind: k("s", max_attempts=0), f"{noun} s: {ATTEMPTS}")],
            **backoffs(lambda k=kind, **given: k("s", **given), f"{noun} s"),
            "prefetch": [(lambda k=kind: k("s", prefetch=0), f"{noun} s: prefetch is 0; it must be a whole number")],
            **{
                name: [(lambda n=name, k=kind: k("s", **{n: -1}), f"{noun} s: {name} is -1; it {SECONDS}")]
                for name in ("horizon_s", seconds)
            },
            **more,
        }
        for kind, noun, texts, seconds, more in (
            (RedisStreamSource, "Redis stream", ("field", "group"), "claim_idle_s", {}),
            (
                NatsSource,
                "NATS stream",
                ("subject", "consumer"),
                "ack_wait_s",
                {
                    "connect": [
                        (lambda: NatsSource("s", connect=3), "NATS stream s: connect is 3; it must be an object")
                    ]
                },
            ),
        )
    },
    **{
        kind: {
            first: [
                (lambda w=w, k=kind: k(w), f"{noun}: {first} is .*; it must be text, such as") for w in ("", 3, None)
            ],
            "schema": [(lambda k=kind: k("s", schema="a strng"), f"{noun} s: .*{SCHEMA}")],
            "unit": [(lambda k=kind: k("s", unit="rows"), f"{noun} s: no message unit 'rows'; it is 'lines'")],
            "name": [(lambda k=kind: k("s", name=3), f"{noun} s: name is 3; it must be text, such as")],
            "database": [
                (lambda k=kind: k("s", database="x"), f"{noun} s: database is not a Postgres URL: it must begin with")
            ],
            "max_attempts": [(lambda k=kind: k("s", max_attempts=0), f"{noun} s: {ATTEMPTS}")],
            **backoffs(lambda k=kind, **given: k("s", **given), f"{noun} s"),
            "metadata": [
                (lambda k=kind: k("s", metadata=("x",)), f"{noun} s: no metadata 'x'; known: {known}"),
                (lambda k=kind: k("s", metadata=7), f"{noun} s: metadata is 7; it is a tuple of names"),
            ],
            **more,
        }
        for kind, noun, first, known, more in (
            (
                RabbitMQSource,
                "RabbitMQ queue",
                "queue",
                "message_id",
                {
                    "url": [(lambda: RabbitMQSource("s", url=3), "RabbitMQ queue s: url is 3; it must be text")],
                    "management": [
                        (
                            lambda: RabbitMQSource("s", management=3),
                            "RabbitMQ queue s: management is 3; it must be text",
                        )
                    ],
                    **_journalled(RabbitMQSource, "RabbitMQ queue", "message_id or header:NAME or field:NAME"),
                },
            ),
            (
                RabbitMQStreamSource,
                "RabbitMQ stream",
                "stream",
                "message_id",
                {
                    "url": [(lambda: RabbitMQStreamSource("s", url=3), "RabbitMQ stream s: url is 3; it must be text")],
                    "start": [
                        (
                            lambda w=w: RabbitMQStreamSource("s", start=w),
                            "RabbitMQ stream s: start is .*; it is 'earliest'",
                        )
                        for w in ("first", -1, True, None, datetime(2026, 1, 1))  # noqa: DTZ001
                    ],
                    "on_gap": [
                        (lambda: RabbitMQStreamSource("s", on_gap="skip"), "on_gap is 'skip'; it must be 'fail' or")
                    ],
                },
            ),
            (
                KestrelSource,
                "Kestrel queue",
                "queue",
                "host",
                {
                    "hosts": [
                        (lambda w=w: KestrelSource("s", hosts=w), "Kestrel queue s: hosts (is|has) .*; (it|each) is")
                        for w in ("h:1", [], None, 3, ["h:x"], [3])
                    ],
                    **{
                        name: [
                            (lambda n=name: KestrelSource("s", **{n: 0}), f"Kestrel queue s: {name} is 0; it must be a")
                        ]
                        for name in ("connections", "open_reads")
                    },
                    **_journalled(KestrelSource, "Kestrel queue", "field:NAME"),
                },
            ),
        )
    },
    FileSource: {
        "path": [(lambda w=w: FileSource(w), "source: path is .*; it must be a path") for w in ("", 3, None)],
        "format": [(lambda: FileSource("x", "csv"), "source x: no format 'csv'; known: parquet")],
        "schema": [
            (lambda: FileSource("x", schema="a strng"), f"source x: .*{SCHEMA}"),
            (
                lambda: FileSource("x", "text", schema="a int"),
                "source x: a line of text is one string .*; take format='jsonl'",
            ),
        ],
        "name": [(lambda: FileSource("x", name=3), "source: name is 3; it must be text, such as")],
        "storage_options": [(lambda: FileSource("s3://b/x", storage_options=3), "source x: storage_options is int")],
        "database": [
            (lambda: FileSource("x", database="x"), "source x: database is not a Postgres URL: it must begin with")
        ],
        "max_attempts": [(lambda: FileSource("x", max_attempts=0), f"source x: {ATTEMPTS}")],
        **backoffs(lambda **given: FileSource("x", **given), "source x"),
        "look_interval_s": [(lambda: FileSource("x", look_interval_s=-1), f"source x: look_interval_s is .*{SECONDS}")],
    },
    MicroBatches: {
        "name": [
            (lambda w=w: MicroBatches(w, "a int"), "source: name is .*; it must be text, such as") for w in ("", 3)
        ],
        "schema": [(lambda: MicroBatches("s", "a it"), f"source s: .*{SCHEMA}")],
        "column": [
            (lambda w=w: MicroBatches("s", "a int", column=w), "source s: column is .*; it must be text")
            for w in ("", 3)
        ],
        "unit": [
            (lambda: MicroBatches("s", "a int", unit="lines"), r"source s: unit='lines' .* name its column="),
            (lambda: MicroBatches("s", "a int", column="v", unit="x"), "source s: no message unit 'x'; it is"),
        ],
        "max_attempts": [(lambda: MicroBatches("s", "a int", max_attempts=0), f"source s: {ATTEMPTS}")],
        **backoffs(lambda **given: MicroBatches("s", "a int", **given), "source s"),
    },
    MemorySink: {
        "name": [(lambda: words().into(MemorySink("")), f"sink {A_NAME}")],
        "store": [
            (
                lambda: MemorySink("o", store=MemoryStore()),
                r"sink 'o': store is MemoryStore\(...\); it must be an object",
            )
        ],
        "staging": [
            (lambda w=w: MemorySink("o", staging=w), "sink 'o': staging is .*; it must be a path") for w in ("", 3)
        ],
        **rules(MemorySink),
        "schema_contract": contracts(MemorySink),
        "refuse": [
            (
                lambda w=w: MemorySink("o", refuse=w),
                "sink 'o': refuse is .*; it must be a function, called as lambda row:",
            )
            for w in (3, "f")
        ],
    },
    CatalogTable: {
        "name": [
            (lambda w=w: CatalogTable(w), "CatalogTable.*: (a table is named as|the name (is of catalog|stands for))")
            for w in ("", "orders", 3, None, "lake.my orders", "unity.lake.orders", "delta.`/tmp/x`", len)
        ],
    },
    DeltaSink: {
        "path": [(lambda w=w: DeltaSink(w), "DeltaSink: path is .*; it must be a path") for w in ("", 3, None)],
        "name": [(lambda w=w: words().into(DeltaSink("x", name=w)), f"sink {A_NAME}") for w in ("", "a b", 3)],
        "compact_every": [
            (
                lambda w=w: DeltaSink("x", compact_every=w),
                r"DeltaSink\('x'\): compact_every is .*; it must be a whole number",
            )
            for w in (0, True, "3")
        ],
        "staging": [(lambda: DeltaSink("x", staging=""), r"DeltaSink\('x'\): staging is ''; it must be a path")],
        "content_digests": [
            (lambda w=w: DeltaSink("x", content_digests=w), r"content_digests is .*; it must be True or False")
            for w in (1, "yes", None)
        ],
        "storage_options": [
            (lambda w=w: DeltaSink("s3://b/x", storage_options=w), r"DeltaSink\('s3://b/x'\): storage_options")
            for w in ("aws_region=x", {"aws_region": 3}, {"": "x"}, ["aws_region"])
        ],
        **rules(DeltaSink),
        "schema_contract": contracts(DeltaSink),
        "partition_by": [
            (lambda w=w: DeltaSink("x", partition_by=w), "partition_by=.* names (no columns; give|'k' twice; leave)")
            for w in ("", 3, None, [3], ["k", "k"], len)
        ],
        "properties": [
            (lambda w=w: DeltaSink("x", properties=w), "properties is .*; it must be a dict of texts, such as {'delta")
            for w in ("", 3, "a=b", [3], {"a": 3}, {3: "a"}, {"": "a"}, len)
        ],
        "committer": [
            (lambda w=w: DeltaSink("x", committer=w), "no committer .*; known: 'auto', 'delta-rs', 'spark'")
            for w in ("", 3, None, "delta", len)
        ],
    },
    PostgresSink: {
        "content_digests": [
            (lambda w=w: PostgresSink("x", content_digests=w), r"content_digests is .*; it must be True or False")
            for w in (1, "yes", None)
        ],
        "table": [
            (lambda w=w: PostgresSink(w), "is not a table's name; write TABLE or SCHEMA.TABLE")
            for w in ("", "a.b.c", 3, None)
        ],
        "name": [(lambda w=w: words().into(PostgresSink("x", name=w)), f"sink {A_NAME}") for w in ("", "a b", 3)],
        "database": [
            (
                lambda: PostgresSink("x", database="x"),
                r"PostgresSink\('x'\): database is not a Postgres URL: it must begin",
            ),
            (lambda: PostgresSink("x", database=3), r"PostgresSink\('x'\): database is a int; it must be a URL"),
        ],
        "staging": [(lambda: PostgresSink("x", staging=3), r"PostgresSink\('x'\): staging is 3; it must be a path")],
        **rules(PostgresSink),
        "schema_contract": contracts(PostgresSink),
    },
    StateSink: {
        "name": [
            (lambda: grouped().persistent_aggregate(n=count()).into(StateSink("a b", MemoryMap())), f"sink {A_NAME}")
        ],
        "factory": [
            (lambda: StateSink("s", "map"), r"state 's': 'map' is no state; give one like PostgresMap"),
            (lambda: StateSink("s", MemoryMap), "state 's': the class MemoryMap is no state; give an object of it"),
        ],
        "updater": [(lambda: StateSink("s", MemoryMap(), updater=len), "state 's': updater is the function len; give")],
        "keys": [
            (lambda: StateSink("s", MemoryMap(), keys="word"), r"state 's': keys is 'word'; give .*keys=\['word'\]")
        ],
        "merges": [
            (
                lambda: StateSink("s", MemoryMap(), merges=max),
                "state 's': merges is the function max; give a function for each",
            ),
            (
                lambda: StateSink("s", MemoryMap(), merges={"n": "sum"}),
                r"state 's': merges\['n'\] is 'sum'; give a function",
            ),
            (
                lambda: StateSink("s", MemoryMap(), merges={"n": len}),
                r"merges\['n'\]: function len gets 2 values: held, added",
            ),
        ],
        "staging": [(lambda: StateSink("s", MemoryMap(), staging=""), "state 's': staging is ''; it must be a path")],
        "database": [
            (lambda: StateSink("s", MemoryMap(), database="x"), "state 's': database is 'x'; it must be an object such")
        ],
    },
    MemoryMap: {
        "kind": [
            (lambda w=w: MemoryMap(w), "MemoryMap: kind is .*; known: non-transactional, transactional")
            for w in ("", "x", 3)
        ],
        "store": [(lambda: MemoryMap(store={}), r"MemoryMap: store is \{\}; it must be an object such as")],
        "name": [(lambda: MemoryMap(name=""), "MemoryMap: name is ''; it must be text, such as")],
    },
    PostgresMap: {
        "table": [(lambda w=w: PostgresMap(w), "is not a table's name; write TABLE or SCHEMA.TABLE") for w in ("", 3)],
        "kind": [
            (lambda: PostgresMap("x", "opak"), r"PostgresMap\('x'\): kind is 'opak'; known: non-transactional"),
            (
                lambda: PostgresMap("x", "non-transactional"),
                r"PostgresMap\('x'\): .*choose 'transactional' or 'opaque'",
            ),
        ],
        "database": [
            (lambda: PostgresMap("x", database="x"), r"PostgresMap\('x'\): database is not a Postgres URL: it must")
        ],
    },
    DeltaMap: {
        "path": [(lambda w=w: DeltaMap(w), "DeltaMap: path is .*; it must be a path") for w in ("", 3)],
        "kind": [(lambda: DeltaMap("x", "opak"), r"DeltaMap\('x'\): kind is 'opak'; known: non-transactional")],
    },
    **{
        kind: {
            "open_store": [
                (
                    lambda k=kind: k(MemoryStore()),
                    rf"{kind.__name__}: open_store is MemoryStore\(...\); it must be a function",
                ),
                (
                    lambda k=kind: k(two),
                    rf"{kind.__name__}: open_store: function two .* gets no values; it takes 2 values: a, b;",
                ),
            ],
            "name": [
                (lambda k=kind: k(MemoryStore, name=""), rf"{kind.__name__}: name is ''; it must be text, such as")
            ],
            "cache_keys": [
                (
                    lambda k=kind: k(MemoryStore, cache_keys=-1),
                    rf"{kind.__name__}: cache_keys is -1; it must be a whole",
                )
            ],
        }
        for kind in (OpaqueMap, TransactionalMap, NonTransactionalMap)
    },
    RowMerge: {
        "function": [
            (lambda: RowMerge(3), r"RowMerge: function is 3; it must be a function, called as f\(held, added\)"),
            (
                lambda: RowMerge(len),
                "RowMerge: function len gets 2 values: held, added; it takes 1 value: obj; write one of two",
            ),
        ]
    },
}


MICRO_BATCHES: Final[Mapping[str, Sequence[Case]]] = {
    "exactly_once": [
        (lambda: exactly_once(name="s"), r"exactly_once\(name='s'\) needs at least one sink"),
        (
            lambda: exactly_once("table", name="s"),
            r"exactly_once\(name='s'\): 'table' is no sink; give one like DeltaSink",
        ),
        (lambda: exactly_once(MemorySink("o"), name="a b"), f"stream {A_NAME}"),
    ],
    "feed": [
        (lambda: feed(words().topology), "topology 't' is fed .*only where its one source is a MicroBatches"),
        (lambda: feed("words"), "feed: 'words' is no topology; give"),
        (lambda: feed(fed(), "twice"), "no guarantee 'twice'; known: at-most-once"),
    ],
}


def fed() -> Topology:
    t = topology()
    t.stream("s", MicroBatches("s", "a int")).into(MemorySink("out"))
    return t


def run_with(engine: Any, **more: Any) -> object:
    stream = words()
    stream.into(MemorySink("out"))
    return stream.topology.run(engine=engine, **more)


def flat(table: Mapping[Any, Mapping[str, Sequence[Case]]]) -> list[Any]:
    return [
        pytest.param(build, said, id=f"{getattr(owner, '__name__', owner)}-{argument}-{number}")
        for owner, arguments in table.items()
        for argument, cases in arguments.items()
        for number, (build, said) in enumerate(cases)
    ]


@pytest.mark.parametrize(("build", "said"), flat(TOPOLOGY))
def test_of_a_topology(build: Callable[[], object], said: str) -> None:
    with pytest.raises(UsageError) as raised:
        build()
    assert isinstance(raised.value, TopologyError) or re.search("engine|metrics_|stop|accept_change", str(raised.value))
    assert re.search(said, str(raised.value)), str(raised.value)
    assert " at 0x" not in str(raised.value)


@pytest.mark.parametrize(("build", "said"), flat(THINGS))
def test_of_a_source_a_sink_or_a_state(build: Callable[[], object], said: str) -> None:
    with pytest.raises(StormproofError) as raised:
        build()
    assert isinstance(raised.value, UsageError)
    assert re.search(said, str(raised.value)), str(raised.value)
    assert " at 0x" not in str(raised.value)


@pytest.mark.parametrize(("build", "said"), [case for cases in MICRO_BATCHES.values() for case in cases])
def test_of_what_a_streaming_query_is_given(build: Callable[[], object], said: str) -> None:
    with pytest.raises(TopologyError) as raised:
        build()
    assert re.search(said, str(raised.value)), str(raised.value)


FREE: Final = {
    "many": "anything true or false will do",
    "clock": "for tests",
    "new_id": "for tests",
    "settings": "of a run, an object of its own type",
    "options": "of a run, an object of its own type",
    "on_batch": "of a run",
    "on_progress": "of a run",
    "on_ready": "of a run",
    "until_idle": "of a run; anything true or false will do",
    "max_batches": "of a run",
    "adopt": "of a run, which compares it with the ledger",
    "rng": "for tests",
}
NO_DECLARATION: Final = {"schema_of", "subscribers", "require_tracking", "validate", "settled"}
"""What asks, and declares nothing; and, by their prefix, what both ways of building are made of."""


def arguments_of(function: Callable[..., object]) -> set[str]:
    names = {name for name in inspect.signature(function).parameters if name != "self"}
    given = inspect.get_annotations(function.__init__ if isinstance(function, type) else function).values()
    for declared in (RunArguments, PendingArguments, RedeliveringArguments):
        if f"Unpack[{declared.__name__}]" in given:
            names |= set(declared.__annotations__)
    return names - set(FREE) - {"arguments", "pending"}


def test_the_table_has_every_argument_of_every_method() -> None:
    wanted: dict[str, set[str]] = {}
    for cls in (Topology, TopologyGraph, Stream, GroupedStream, OutputStream):
        for name, function in inspect.getmembers(cls, inspect.isfunction):
            own = not name.startswith("_") or (cls is OutputStream and name == "__getitem__")
            if own and name not in NO_DECLARATION and not name.startswith("add_") and arguments_of(function):
                shown = "Topology" if cls is TopologyGraph else cls.__name__
                wanted[f"{shown}.{name}"] = arguments_of(function)
    wanted["Topology.__init__"] = arguments_of(Topology.__init__)
    assert {name: set(cases) for name, cases in TOPOLOGY.items()} == wanted


@pytest.mark.parametrize("cls", THINGS)
def test_the_table_has_every_argument_of_every_constructor(cls: type) -> None:
    assert set(THINGS[cls]) == arguments_of(cls)


# -- what must not be refused ------------------------------------------------------------------------------------------


class Callable2:
    def __call__(self, word: object, size: object = 0) -> object:
        return word


def wrapped(function: Callable[..., object]) -> Callable[[object], object]:
    @functools.wraps(function)
    def inner(word: object) -> object:
        return function(word, "more")

    return inner


@pytest.mark.parametrize(
    "function",
    [
        len, int, str, float, bool, list, dict, max, print, str.upper, "{}".format, {}.get, Callable2(),
        functools.partial(two, 1), functools.cache(len), wrapped(two), lambda *a: a, lambda a, *, b=1: a, Path,
        re.compile("x").match, functools.partial(two, b=1), lambda *a, **k: a,
    ],
)  # fmt: skip
def test_a_function_that_takes_a_value_is_taken(function: Callable[..., object]) -> None:
    words().map(function, "word", schema="x string")


def test_an_aggregate_that_takes_any_fields_is_taken() -> None:
    class Rows(ReducerAggregator):
        result = "long"

        def init(self) -> int:
            return 0

        def reduce(self, value: int, /, *values: object, **_: object) -> int:
            return value + 1

    words().group_by("word").agg(n=Rows(), letters=Letters().over("word"))


def test_a_map_may_be_merged_by_a_function_of_arrays() -> None:
    def newest(held: pa.Array, added: pa.Array) -> pa.Array:
        return added

    StateSink("s", MemoryMap(), keys=("word",), merges={"size": newest, "n": RowMerge(max)})
