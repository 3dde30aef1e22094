"""Lines become messages: split at the line feed only, every other byte kept."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stormproof.core.base.errors import UsageError
from stormproof.core.source.postgres_queue import PostgresQueue, message_table
from stormproof.core.source.postgres_queue.message_table import lines_of


@pytest.mark.parametrize(
    ("content", "lines"),
    [
        (b"", []),
        (b"\n", [b""]),
        (b"a", [b"a"]),
        (b"a\n", [b"a"]),
        (b"a\n\nb", [b"a", b"", b"b"]),
        (b"\n\n", [b"", b""]),
        (b"a\r\nb\x0cc\x85\xe2\x80\xa8d\x00", [b"a\r", b"b\x0cc\x85\xe2\x80\xa8d\x00"]),
    ],
)
def test_lines(content: bytes, lines: list[bytes]) -> None:
    assert list(lines_of(io.BytesIO(content))) == lines


@given(
    lines=st.lists(st.binary(max_size=9).map(lambda b: b.replace(b"\n", b"")), max_size=20), block=st.integers(1, 12)
)
def test_lines_across_blocks(lines: list[bytes], block: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(message_table, "BLOCK_BYTES", block)
        assert list(lines_of(io.BytesIO(b"".join(line + b"\n" for line in lines)))) == lines


@pytest.mark.parametrize("name", ["", "1a", 'a"b', "a.b", "a" * 41, "a b", "ä"])
def test_a_name_that_cannot_be_a_table_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="queue's name"):
        PostgresQueue(name)


def test_settings_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="max_attempts"):
        PostgresQueue("lines", max_attempts=0)
    with pytest.raises(UsageError, match="'earliest' or 'latest'"):
        PostgresQueue("lines", start="middle")  # type: ignore[arg-type]
