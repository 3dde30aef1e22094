"""Functions that wait: several calls at a time, in threads or in an event loop; results and failures by row, as ever."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pyarrow as pa
import pytest

from stormproof import FailTuple, context
from stormproof.core.base.errors import MachineUnavailable, UsageError
from stormproof.core.base.message import FailureReason
from stormproof.core.contract.schema import parse_schema
from stormproof.core.graph.components import OperationKind
from stormproof.core.graph.plan import OperationNode
from stormproof.core.task import concurrent_calls
from stormproof.core.task.operate import Calls, OperationResult, apply

AT_A_TIME = 4
LONG_S = 30.0
NUMBERS = pa.record_batch({"n": [*range(12)]})


def applied(
    function: Callable[..., Any],
    *,
    kind: OperationKind = OperationKind.MAP,
    calls: Calls | None = None,
    at_a_time: int | None = AT_A_TIME,
    is_async: bool = False,
    rows: pa.RecordBatch = NUMBERS,
) -> OperationResult:
    node = OperationNode("f", kind, function, ("n",), parse_schema("n long"), (), at_a_time, is_async)
    return apply(node, rows, None, calls or Calls(message_id=lambda row: f"m{row}", timeout_s=LONG_S))


def made(outcome: OperationResult) -> list[int]:
    found: list[int] = outcome.rows.column("n").to_pylist()
    return found


class Meeting:
    """Calls that only end once so many of them are there at a time."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(AT_A_TIME, timeout=LONG_S)
        self._here, self._all = 0, asyncio.Event()

    def blocking(self, n: int) -> int:
        self._barrier.wait()
        return n * n

    async def waiting(self, n: int) -> int:
        self._here += 1
        if self._here % AT_A_TIME == 0:
            self._all.set()
            self._all = asyncio.Event()
        else:
            await asyncio.wait_for(self._all.wait(), LONG_S)
        return n * n


def test_so_many_calls_are_made_at_a_time_and_results_keep_their_order() -> None:
    squares = [n * n for n in range(12)]
    assert made(applied(Meeting().blocking)) == squares
    assert made(applied(Meeting().waiting, is_async=True)) == squares


def test_control_one_call_at_a_time_meets_nobody() -> None:
    barrier = threading.Barrier(2, timeout=0.01)
    outcome = applied(lambda n: barrier.wait() or n, at_a_time=1)
    assert sorted(outcome.failed) == [*range(12)]


def unlucky(n: int) -> int:
    if n == 3:
        raise FailTuple("not this one")
    if n == 5:
        raise ValueError("broken")
    if n == 7:
        sys.exit("no exit")
    return n


async def unlucky_later(n: int) -> int:
    await asyncio.sleep(0)
    return unlucky(n)


@pytest.mark.parametrize(("function", "is_async"), [(unlucky, False), (unlucky_later, True)])
def test_a_call_that_raises_fails_its_own_row(function: Callable[..., Any], is_async: bool) -> None:
    outcome = applied(function, is_async=is_async)
    assert (sorted(outcome.failed), dict(outcome.reasons)) == ([3, 5, 7], {3: FailureReason.FAILED})
    assert outcome.failed[5].startswith("ValueError: broken (test_waiting.py:")
    assert [n for row, n in enumerate(made(outcome)) if row not in outcome.failed] == [0, 1, 2, 4, 6, 8, 9, 10, 11]
    alone = applied(function, is_async=is_async, at_a_time=1 if is_async else None)
    assert (alone.failed, alone.reasons) == (outcome.failed, outcome.reasons), "as without concurrency"


@pytest.fixture
def released() -> Iterator[threading.Event]:
    event = threading.Event()
    yield event
    event.set()


def test_a_call_that_is_not_over_in_time_fails_alone_and_its_thread_is_left(released: threading.Event) -> None:
    outcome = applied(lambda n: n if n != 4 else released.wait(), calls=Calls(timeout_s=0.2))
    assert (sorted(outcome.failed), dict(outcome.reasons)) == ([4], {4: FailureReason.TIMEOUT})
    assert "not over after 0.2 s" in outcome.failed[4]
    assert "may still run" in outcome.failed[4]


def test_an_async_call_that_is_not_over_in_time_is_cancelled() -> None:
    cancelled: list[int] = []

    async def stuck(n: int) -> int:
        try:
            await asyncio.sleep(LONG_S if n == 4 else 0)
        except asyncio.CancelledError:
            cancelled.append(n)
            raise
        return n

    outcome = applied(stuck, calls=Calls(timeout_s=0.2), is_async=True)
    assert (sorted(outcome.failed), dict(outcome.reasons)) == ([4], {4: FailureReason.TIMEOUT})
    applied(stuck, rows=NUMBERS.slice(0, 1), is_async=True)  # the loop has gone on since
    assert cancelled == [4]


def test_more_calls_that_never_end_than_a_process_can_leave_behind_are_nobodys_fault(
    released: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(concurrent_calls, "LEFT_MAX", len(concurrent_calls.left_behind) + 2)
    with pytest.raises(MachineUnavailable, match="No message is to blame"):
        applied(lambda _: released.wait(), calls=Calls(timeout_s=0.1))


class Cancelled(Exception): ...


@pytest.mark.parametrize("is_async", [False, True])
def test_a_job_that_is_cancelled_waits_for_no_call(released: threading.Event, is_async: bool) -> None:
    asked: list[int] = []

    def go_on() -> None:
        asked.append(1)
        if len(asked) == 2:
            raise Cancelled

    async def stuck(n: int) -> None:
        await asyncio.sleep(LONG_S)

    function = stuck if is_async else lambda _: released.wait()
    with pytest.raises(Cancelled):
        applied(function, calls=Calls(timeout_s=LONG_S, go_on=go_on), is_async=is_async)


def test_each_call_knows_its_message() -> None:
    async def of_call(n: int) -> int:
        await asyncio.sleep(0)
        return int(context.message_id.removeprefix("m")) - n

    asked = [applied(lambda n: int(context.message_id.removeprefix("m")) - n, at_a_time=a) for a in (None, 1, 4)]
    asked.append(applied(of_call, is_async=True))
    assert [made(outcome) for outcome in asked] == [[0] * 12] * 4
    with pytest.raises(UsageError, match="inside a call"):
        _ = context.message_id


def test_flat_map_gathers_what_is_yielded_and_filter_what_is_true() -> None:
    def blocking(n: int) -> Iterator[int]:
        yield from range(n)

    async def later(n: int) -> AsyncIterator[int]:
        for one in range(n):
            await asyncio.sleep(0)
            yield one

    async def is_even(n: int) -> bool:
        return n % 2 == 0

    several = [one for n in range(12) for one in range(n)]
    assert made(applied(blocking, kind=OperationKind.FLAT_MAP)) == several
    assert made(applied(later, kind=OperationKind.FLAT_MAP, is_async=True)) == several
    assert made(applied(is_even, kind=OperationKind.FILTER, is_async=True)) == [0, 2, 4, 6, 8, 10]


@pytest.mark.filterwarnings("ignore:coroutine")
def test_a_filter_that_gives_a_coroutine_keeps_nothing_and_says_why() -> None:
    async def is_even(n: int) -> bool:
        return n % 2 == 0

    outcome = applied(is_even, kind=OperationKind.FILTER, at_a_time=None)
    assert (made(outcome), sorted(outcome.failed)) == ([], [*range(12)])
    assert "make the function itself async" in outcome.failed[0]
