"""Groupings: what each promises, what is refused, and that broken routers are caught."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from support.groupings import (
    ForgetsBetweenBatches,
    HasOneCandidate,
    IgnoresKeys,
    MakesRouter,
    MixesEmitterIn,
    MixesPositionIn,
    check_even,
    check_levelled,
    check_one_task_a_key,
    check_two_tasks_a_key,
    routed,
    words,
    zipf,
)

from stormproof import BasicBolt, MemorySource, Topology, Tuple
from stormproof.core.base.errors import RoutingError, TopologyError
from stormproof.core.bolt.api import Emit
from stormproof.core.graph.components import Grouping, GroupingKind
from stormproof.core.task.router import Router, candidates, task_numbers


class Meets(BasicBolt):
    streams = "k string"

    def execute(self, tuple: Tuple, emit: Emit, /) -> None:
        emit(str(tuple["k"]))


SCHEMA = pa.schema([("word", pa.string()), ("n", pa.int64()), ("price", pa.float64())])
ROWS = words(["a", "b", "a", None, "c", "a", "b", None])
EMITTERS = [[ROWS.slice(0, 3), ROWS.slice(3)], [ROWS.slice(1, 6)], [words(["c", "b", None, "a"])]]


def custom(function: Callable[..., object], rows: pa.RecordBatch = ROWS, tasks: int = 4) -> list[int]:
    grouping = Grouping(GroupingKind.CUSTOM, function=function)
    found: list[int] = Router(grouping, tasks, 0, component="counts").route(rows).tolist()
    return found


def test_shuffle_is_even_over_all_that_a_task_sent() -> None:
    check_even(Router, GroupingKind.SHUFFLE, [1, 1, 5, 0, 3, 7], tasks=4, task=2)


def test_a_shuffle_that_forgets_is_caught() -> None:
    with pytest.raises(AssertionError, match="one emitting task sent"):
        check_even(ForgetsBetweenBatches, GroupingKind.SHUFFLE, [1, 1, 5], tasks=4, task=2)


def test_emitting_tasks_do_not_all_begin_at_task_0() -> None:
    firsts = [int(Router(Grouping(GroupingKind.SHUFFLE), 4, task).route(words("x"))[0]) for task in range(8)]
    assert sorted(firsts) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_fields_sends_a_key_to_one_task_and_null_is_a_key() -> None:
    check_one_task_a_key(Router, EMITTERS, tasks=5)


@pytest.mark.parametrize("broken", [MixesPositionIn, MixesEmitterIn])
def test_a_fields_grouping_by_more_than_the_key_is_caught(broken: MakesRouter) -> None:
    with pytest.raises(AssertionError, match="went to the tasks"):
        check_one_task_a_key(broken, EMITTERS, tasks=5)


def test_fields_of_two_are_one_key() -> None:
    rows = pa.record_batch({"a": ["x", "xy", "x", None], "b": [1, 1, 1, 1]})
    grouping = Grouping(GroupingKind.FIELDS, ("a", "b"))
    found = Router(grouping, 1_000, 0).route(rows).tolist()
    assert found[0] == found[2]
    assert len(set(found)) == 3


def test_all_gives_every_task_a_copy_of_each_row() -> None:
    router = Router(Grouping(GroupingKind.ALL), 3, 1)
    assert router.copies
    assert router.route(words("ab")).tolist() == [0, 1, 2, 0, 1, 2]
    assert not Router(Grouping(GroupingKind.SHUFFLE), 3, 1).copies


def test_global_is_task_0() -> None:
    assert Router(Grouping(GroupingKind.GLOBAL), 3, 1).route(ROWS).tolist() == [0] * 8


@pytest.mark.parametrize("kind", [GroupingKind.NONE, GroupingKind.LOCAL_OR_SHUFFLE])
def test_none_and_local_or_shuffle_stay_where_they_are(kind: GroupingKind) -> None:
    assert Grouping(kind).fused
    assert Router(Grouping(kind), 3, 1).route(ROWS).tolist() == [1] * 8
    check_even(Router, kind, [2, 3, 4], tasks=3, task=5)  # there is no task 5 to stay in


def test_only_none_and_local_or_shuffle_are_fused() -> None:
    assert {kind for kind in GroupingKind if Grouping(kind).fused} == {
        GroupingKind.NONE,
        GroupingKind.LOCAL_OR_SHUFFLE,
    }


def test_partial_key_sends_a_key_to_two_tasks_at_most() -> None:
    check_two_tasks_a_key(Router, [[words("abcab" * 20)] * 3, [words("ab" * 9)]], tasks=7)


def test_a_partial_key_that_ignores_keys_is_caught() -> None:
    with pytest.raises(AssertionError, match="more than two tasks"):
        check_two_tasks_a_key(IgnoresKeys, [[words("abcab" * 20)] * 3], tasks=7)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("tasks", "exponent", "keys"), [(2, 1.5, 1_000), (4, 1.2, 2_000), (8, 0.9, 2_000), (32, 0.6, 4_000), (64, 0, 1_000)]
)
def test_partial_key_is_level_on_skewed_keys(tasks: int, exponent: float, keys: int, seed: int) -> None:
    heaviest, drawn = zipf(keys, exponent, 20_000, seed)
    assert heaviest <= 1 / tasks
    check_levelled(Router, 2, tasks, drawn, seed, bound=1.1)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("tasks", "exponent", "keys"), [(4, 1.6, 1_000), (8, 1.2, 2_000), (16, 1.0, 2_000)])
def test_partial_key_stays_within_its_bound_up_to_twice_the_mean(
    tasks: int, exponent: float, keys: int, seed: int
) -> None:
    heaviest, drawn = zipf(keys, exponent, 20_000, seed)
    assert 1 / tasks < heaviest <= 2 / tasks
    check_levelled(Router, 2, tasks, drawn, seed, bound=1.5)


def test_a_partial_key_with_one_candidate_is_caught() -> None:
    _, drawn = zipf(2_000, 1.2, 20_000, 1)
    with pytest.raises(AssertionError, match="times the mean"):
        check_levelled(HasOneCandidate, 2, 4, drawn, 1, bound=1.1)


def test_partial_key_levels_many_small_batches_too() -> None:
    _, drawn = zipf(1_000, 0.8, 2_000, 1)
    check_levelled(Router, 1, 8, drawn, 1, bound=1.1, batch_rows=20)


def test_a_heavy_key_is_halved() -> None:
    counts = np.bincount(Router(Grouping(GroupingKind.PARTIAL_KEY, ("word",)), 5, 0).route(words("x" * 101)))
    assert sorted(counts[counts > 0].tolist()) == [50, 51]


def test_partial_key_levels_what_a_fields_grouping_sent_to_one_task() -> None:
    """Both hash the same key: were they the same hash, one candidate of all these keys were the emitting task."""
    keys = np.array([f"w{i}" for i in range(8_000)])
    mine = keys[task_numbers(words(keys.tolist()), ["word"], 4) == 2].tolist()
    low, high = candidates(words(mine), ("word",), 4)
    assert 0.4 < float(np.mean((low == 2) | (high == 2))) < 0.6
    assert (low < high).all()


def test_partial_key_with_one_task_or_no_rows() -> None:
    grouping = Grouping(GroupingKind.PARTIAL_KEY, ("word",))
    assert Router(grouping, 1, 0).route(ROWS).tolist() == [0] * 8
    assert Router(grouping, 3, 0).route(ROWS.slice(0, 0)).tolist() == []


def test_direct_goes_where_the_emitter_says() -> None:
    router = Router(Grouping(GroupingKind.DIRECT), 3, 0, component="counts")
    assert router.route(words("abc"), np.array([2, 0, 2], np.int64)).tolist() == [2, 0, 2]
    with pytest.raises(RoutingError, match="component 'counts', direct grouping: the emitter named no task"):
        router.route(words("abc"))
    with pytest.raises(RoutingError, match=r"named task 3; there are tasks 0 to 2 \(row 1 and 1 more of") as caught:
        router.route(words("abc"), np.array([2, 3, -1], np.int64))
    assert caught.value.rows == (1, 2)


@pytest.mark.parametrize(
    "answer",
    [[0, 1, 2, 3] * 2, np.arange(8, dtype=np.uint8) % 4, pa.array([3] * 8), pa.chunked_array([[1] * 5, [2] * 3])],
)
def test_custom_takes_any_array_of_integers(answer: object) -> None:
    found = custom(lambda rows, tasks: answer)
    assert found == [int(x) for x in np.asarray(answer).tolist()]


def test_custom_is_called_with_rows_and_tasks_and_never_for_no_rows() -> None:
    called: list[tuple[int, int]] = []

    def last(rows: pa.RecordBatch, tasks: int) -> list[int]:
        called.append((rows.num_rows, tasks))
        return [tasks - 1] * rows.num_rows

    assert custom(last) == [3] * 8
    assert custom(last, ROWS.slice(0, 0)) == []
    assert called == [(8, 4)]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (lambda n: [0] * (n + 1), r"gave numbers of shape \(2,\) for 1 rows"),
        (lambda n: 3, r"gave numbers of shape \(\) for 1 rows"),
        (lambda n: None, r"gave numbers of shape \(\) for 1 rows"),
        (lambda n: [[0]] * n, r"gave numbers of shape \(1, 1\) for 1 rows"),
        (lambda n: [0.0] * n, "gave float64 instead of integers"),
        (lambda n: [True] * n, "gave bool instead of integers"),
        (lambda n: [[0], 1], "raised ValueError"),
        (lambda n: pa.array([None] * (n + 1), pa.int64()), "gave NULL"),
        (lambda n: np.full(n, 2**63, np.uint64), "gave task 9223372036854775808; there are tasks 0 to 3"),
    ],
)
def test_nonsense_of_a_custom_function_is_named(answer: Callable[[int], object], said: str) -> None:
    def nonsense(rows: pa.RecordBatch, tasks: int) -> object:
        return answer(rows.num_rows)

    with pytest.raises(
        RoutingError, match=rf"component 'counts', custom grouping: function .*nonsense {said}"
    ) as caught:
        custom(nonsense)
    assert caught.value.rows == tuple(range(8))
    assert caught.value.details["component"] == "counts"


@pytest.mark.parametrize("answer", [[0, 4, 0, -1, 0, 0, 0, 0], pa.array([0, None, 0, None, 0, 0, 0, 0])])
def test_only_the_rows_without_a_task_are_blamed(answer: object) -> None:
    with pytest.raises(RoutingError, match=r"\(row 1 and 1 more of the record batch\)") as caught:
        custom(lambda rows, tasks: answer)
    assert caught.value.rows == (1, 3)
    copy = pickle.loads(pickle.dumps(caught.value))  # noqa: S301 - our own bytes
    assert copy.texts == caught.value.texts
    if isinstance(answer, list):
        assert "gave task -1; there are tasks 0 to 3" in copy.texts[3]


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(1), GeneratorExit()])
def test_a_row_that_makes_a_custom_function_raise_stands_alone(error: BaseException) -> None:
    calls: list[int] = []

    def bad(rows: pa.RecordBatch, tasks: int) -> object:
        calls.append(rows.num_rows)
        if "c" in rows.column("word").to_pylist():
            raise error
        return [1] * rows.num_rows

    with pytest.raises(RoutingError, match=r"bad raised .* \(test_grouping.py:\d+ in bad\) \(row 4 of") as caught:
        custom(bad)
    assert caught.value.rows == (4,)
    assert calls == [8, 4, 4, 2, 1, 1, 2]


def test_a_custom_grouping_without_a_function_blames_all_rows() -> None:
    with pytest.raises(RoutingError, match="it has no function") as caught:
        Router(Grouping(GroupingKind.CUSTOM), 2, 0).route(ROWS)
    assert caught.value.rows == tuple(range(8))


def test_ctrl_c_goes_through_a_custom_function() -> None:
    def stopped(rows: pa.RecordBatch, tasks: int) -> object:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        custom(stopped)


def test_the_same_rows_in_the_same_order_have_the_same_tasks() -> None:
    batches = [words("abcabd" * 5), words("xyab")]
    for kind in (GroupingKind.SHUFFLE, GroupingKind.FIELDS, GroupingKind.PARTIAL_KEY):
        grouping = Grouping(kind, ("word",) if kind is not GroupingKind.SHUFFLE else ())
        assert routed(Router(grouping, 3, 1), batches) == routed(Router(grouping, 3, 1), batches)


def test_a_router_needs_a_task() -> None:
    with pytest.raises(ValueError, match="cannot send to 0 tasks"):
        Router(Grouping(GroupingKind.GLOBAL), 0, 0)


def zeros(rows: pa.RecordBatch, tasks: int) -> list[int]:
    return [0] * rows.num_rows


@pytest.mark.parametrize(
    "grouping",
    [
        *(Grouping(kind) for kind in GroupingKind if kind not in ("fields", "partial_key", "custom")),
        Grouping(GroupingKind.FIELDS, ("word", "n")),
        Grouping(GroupingKind.PARTIAL_KEY, ("n",)),
        Grouping(GroupingKind.CUSTOM, function=zeros),
    ],
    ids=lambda g: g.kind.value,
)
def test_good_groupings_pass(grouping: Grouping) -> None:
    grouping.check(SCHEMA, "counts")


@pytest.mark.parametrize(
    ("grouping", "said"),
    [
        (Grouping(GroupingKind.FIELDS, ("wrod",)), "unknown field 'wrod'; known: word, n, price"),
        (Grouping(GroupingKind.FIELDS), "name at least one field; known: word, n, price"),
        (Grouping(GroupingKind.PARTIAL_KEY), "name at least one field; known: word, n, price"),
        (Grouping(GroupingKind.FIELDS, ("word", "word")), "field 'word' stands twice"),
        (Grouping(GroupingKind.PARTIAL_KEY, ("price",)), "field 'price' is double, which can't be a key"),
        (Grouping(GroupingKind.SHUFFLE, ("word",)), "it takes no fields, got 'word'"),
        (Grouping(GroupingKind.CUSTOM), "it needs a function of the rows and the number of tasks, got None"),
        (Grouping(GroupingKind.FIELDS, ("word",), zeros), "it takes no function"),
    ],
)
def test_bad_groupings_are_refused_by_name(grouping: Grouping, said: str) -> None:
    with pytest.raises(TopologyError, match=f"component 'counts', {grouping.kind} grouping: {said}"):
        grouping.check(SCHEMA, "counts")


def test_a_grouping_survives_pickling() -> None:
    grouping = Grouping(GroupingKind.CUSTOM, function=zeros)
    assert pickle.loads(pickle.dumps(grouping)) == grouping  # noqa: S301 - our own bytes


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("decimal(10,2)", "decimal(10,3)"),
        ("decimal(10,0)", "long"),
        ("date", "timestamp"),
        ("timestamp", "timestamp_ntz"),
        ("string", "binary"),
    ],
)
def test_inputs_that_are_grouped_by_different_types_are_refused(one: str, other: str) -> None:
    t = Topology("types")
    inputs = [t.spout(name, MemorySource(name, [], schema=f"k {type_}")) for name, type_ in (("a", one), ("b", other))]
    with pytest.raises(TopologyError, match="equal values would go to different tasks"):
        t.bolt("meet", Meets(), *(input_.fields("k") for input_ in inputs))


def test_equal_whole_numbers_of_different_widths_go_to_one_task() -> None:
    t = Topology("types")
    inputs = [
        t.spout(name, MemorySource(name, [], schema=f"k {type_}")) for name, type_ in (("a", "int"), ("b", "long"))
    ]
    t.bolt("meet", Meets(), *(input_.fields("k") for input_ in inputs))
    numbers = [pa.record_batch([pa.array([3, -1, None], type_)], ["k"]) for type_ in (pa.int32(), pa.int64())]
    assert len({task_numbers(rows, ["k"], 64).tobytes() for rows in numbers}) == 1
