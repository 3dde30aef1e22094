"""What a numbered source does for its connector."""

from __future__ import annotations

from stormproof.core.contract.source import SliceReader
from stormproof.core.source.memory import MemorySource


class Watched(MemorySource):
    """Notes which ranges are read."""

    def __init__(self, payloads: list[bytes]) -> None:
        super().__init__("watched", payloads)
        self.ranges: list[tuple[int, int]] = []

    def reader(self, first: int, stop: int) -> SliceReader:
        self.ranges.append((first, stop))
        return super().reader(first, stop)


def test_payloads_of_failed_messages_are_read_and_nothing_between_them() -> None:
    source = Watched([f"m{number}".encode() for number in range(1_000)])
    found = source.range_payloads([0, 1, 2, 500, 998, 999], None)
    assert found == {number: f"m{number}".encode() for number in (0, 1, 2, 500, 998, 999)}
    assert source.ranges == [(0, 3), (500, 501), (998, 1_000)]
