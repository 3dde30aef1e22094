"""The queue of the Kestrel test server: what Kestrel's own tests ask of its persistent queue."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from kestrel_server.queue import Item, Queue, QueueLimits
from kestrel_server.server import Queues


class Shop:
    """A queue in a folder, with a clock that is moved by hand."""

    def __init__(self, folder: Path, limits: QueueLimits | None = None) -> None:
        self.folder = folder
        self.limits = limits or QueueLimits()
        self.now_ms = 1_000_000
        self.expired: list[Item] = []
        self.queue = self.opened()

    def opened(self) -> Queue:
        return Queue("q", self.folder, self.limits, lambda: self.now_ms, self.expired.append)

    def restart(self) -> None:
        """As after a kill: what was written is all that there is."""
        self.queue.end()
        self.queue = self.opened()

    def put(self, *items: bytes) -> None:
        for item in items:
            assert self.queue.put(item)

    def drained(self) -> list[bytes]:
        found: list[bytes] = []
        while (item := self.queue.take()) is not None:
            found.append(item.data)
        return found


@pytest.fixture
def shops(tmp_path: Path) -> Iterator[Callable[..., Shop]]:
    """Makes queues, each in a folder of its own."""
    made: list[Shop] = []

    def make(**limits: Any) -> Shop:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        made.append(Shop(folder, QueueLimits(**limits)))
        return made[-1]

    yield make
    for shop in made:
        shop.queue.end()


@pytest.fixture
def shop(shops: Callable[..., Shop]) -> Shop:
    return shops()


def test_items_come_in_the_order_in_which_they_were_put(shop: Shop) -> None:
    shop.put(b"a", b"", b"\r\nEND\r\n")
    assert shop.drained() == [b"a", b"", b"\r\nEND\r\n"]


def test_an_open_read_is_gone_once_it_is_closed_and_at_the_head_once_it_is_aborted(shop: Shop) -> None:
    shop.put(b"a", b"b")
    one, two = shop.queue.open(), shop.queue.open()
    assert one is not None
    assert two is not None
    shop.queue.close(one[0])
    shop.put(b"c")
    shop.queue.abort(two[0])
    assert shop.drained() == [b"b", b"c"]


def test_an_end_of_a_read_may_be_repeated_and_one_that_is_unknown_does_nothing(shop: Shop) -> None:
    shop.put(b"a")
    opened = shop.queue.open()
    assert opened is not None
    for _ in range(2):
        shop.queue.close(opened[0])
        shop.queue.abort(opened[0])
    shop.queue.close(99)
    assert (shop.drained(), shop.queue.open_reads) == ([], 0)


def test_a_restart_keeps_items_and_gives_back_what_was_open_first_read_first(shop: Shop) -> None:
    shop.put(b"a", b"b", b"c", b"d")
    opened = [shop.queue.open() for _ in range(3)]
    assert opened[1] is not None
    shop.queue.close(opened[1][0])
    shop.restart()
    assert shop.queue.open_reads == 0
    assert shop.drained() == [b"a", b"c", b"d"]
    shop.restart()
    assert shop.drained() == []


def test_a_record_that_a_crash_tore_is_cut_off(shop: Shop) -> None:
    shop.put(b"a", b"b" * 50)
    path = shop.folder / "q"
    path.write_bytes(path.read_bytes()[:-7])
    shop.restart()
    shop.put(b"c")
    shop.restart()
    assert shop.drained() == [b"a", b"c"]


def test_what_is_no_journal_is_refused(shop: Shop) -> None:
    (shop.folder / "q").write_bytes(b"\xff" * 100)
    with pytest.raises(ValueError, match="no journal"):
        shop.restart()


def test_a_long_journal_is_written_anew_with_what_is_open(shops: Callable[..., Shop]) -> None:
    shop = shops(max_journal_bytes=1_000)
    shop.put(b"first", b"open")
    shop.queue.take()
    assert shop.queue.open() is not None
    for n in range(100):
        shop.put(b"%d" % n)
        shop.queue.take()
    assert (shop.folder / "q").stat().st_size < 2_000
    shop.restart()
    assert shop.drained() == [b"open"]


def test_items_expire_by_their_own_time_or_by_age_and_can_be_kept_elsewhere(shops: Callable[..., Shop]) -> None:
    shop = shops(max_age_s=60)
    shop.queue.put(b"soon", shop.now_ms + 1_000)
    shop.put(b"later")
    shop.now_ms += 2_000
    assert shop.queue.peek() == Item(b"later", 1_000_000, 1_060_000)
    shop.now_ms += 60_000
    assert shop.queue.open() is None
    assert [item.data for item in shop.expired] == [b"soon", b"later"]
    assert shop.queue.counters.expired_items == 2


def test_the_oldest_open_read_times_out_when_somebody_asks_and_no_other(shops: Callable[..., Shop]) -> None:
    shop = shops(open_timeout_s=5)
    shop.put(b"a", b"b", b"c")
    shop.queue.open()
    shop.queue.open()
    shop.now_ms += 6_000
    assert shop.queue.open_reads == 2
    opened = shop.queue.open()
    assert opened is not None
    assert opened[1].data == b"a"
    assert shop.queue.open_reads == 2


def test_a_full_queue_refuses_or_drops_its_oldest(shops: Callable[..., Shop]) -> None:
    refuses = shops(max_items=2)
    refuses.put(b"a", b"b")
    assert not refuses.queue.put(b"c")
    drops = shops(max_items=2, discard_old=True)
    drops.put(b"a", b"b", b"c")
    assert drops.drained() == [b"b", b"c"]
    assert drops.queue.counters.discarded == 1
    assert not shops(max_item_bytes=3).queue.put(b"four")


def test_a_fanout_gives_each_child_a_copy_from_its_first_mention_on(tmp_path: Path) -> None:
    queues = Queues(tmp_path)
    queues.put("orders", b"before")
    assert queues["orders+audit"].peek() is None
    queues.put("orders", b"after")
    taken = [queues[name].take() for name in ("orders+audit", "orders")]
    assert [item.data for item in taken if item] == [b"after", b"before"]
    queues.end()


def test_what_expires_goes_to_the_queue_for_it_and_stays_there(tmp_path: Path) -> None:
    now_ms = 1_000_000
    queues = Queues(tmp_path, QueueLimits(max_age_s=1, expire_to="old"), lambda: now_ms)
    queues.put("q", b"a")
    now_ms += 5_000
    assert queues["q"].peek() is None
    now_ms += 5_000
    kept = queues["old"].peek()
    assert kept is not None
    assert kept.data == b"a"
    queues.end()


@pytest.mark.parametrize("seed", range(20))
def test_a_queue_is_what_a_list_would_be_through_restarts(shops: Callable[..., Shop], seed: int) -> None:
    """A model: a list, and what is open of it."""
    rng = Random(seed)
    shop = shops(max_journal_bytes=rng.choice([100, 1 << 20]))
    items: list[bytes] = []
    held: dict[int, bytes] = {}
    for step in range(200):
        match rng.choice(["put", "put", "take", "open", "close", "abort", "restart"]):
            case "put":
                shop.put(b"%d" % step)
                items.append(b"%d" % step)
            case "take":
                item = shop.queue.take()
                assert (item.data if item else None) == (items.pop(0) if items else None)
            case "open" if (opened := shop.queue.open()) is not None:
                assert opened[1].data == items.pop(0)
                held[opened[0]] = opened[1].data
            case "close" if held:
                xid = rng.choice(list(held))
                shop.queue.close(xid)
                del held[xid]
            case "abort" if held:
                xid = rng.choice(list(held))
                shop.queue.abort(xid)
                items.insert(0, held.pop(xid))
            case "restart" if rng.random() < 0.2:
                shop.restart()
                items = [*held.values(), *items]
                held.clear()
            case _:
                pass
    assert shop.drained() == items
