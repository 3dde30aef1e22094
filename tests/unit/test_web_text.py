"""Others' texts as the page shows them: nothing hides, nothing reorders, nothing is endless, nothing is markup."""

from __future__ import annotations

import unicodedata
from typing import Final

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.web import Elements

from stormproof.trident.web.render import SHOWN_MAX, duration, environment, exact, one_line, visible

HOSTILE: Final = (
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "' onfocus='alert(1)' autofocus='",
    "{{ 7*7 }}{% raw %}",
    "javascript:alert(1)",
    "</title></textarea></script><svg/onload=alert(1)>",
    "&lt;b&gt;&#x3c;i&#x3e;",
    "\u202egnp.exe\u2066",
    "a\x00b\x1b[31mc\x07\x9b",
    "Z\u0300\u0301\u0302\u0303\u0304\u0305\u0306\u0307",
    "\ud800 lone, \udfff",
    "\u200bze\u200dro\ufeff width\u2060",
    "\u2028line\u2029",
    "--><!-- ]]>",
    "\r\nSet-Cookie: a=b",
    "<" * 3_000,
    "x" * 1_048_576,
    "\U000e0041tag",
    "' or 1=1; drop table x; --",
    "../../etc/passwd",
    "http://evil.example/?q=<a>",
)
TEMPLATE: Final = """
<p title="{{ x }}">{{ x }}</p><a href="/?{{ x|line }}">{{ x|line }}</a><pre>{{ x|long }}</pre><i data-x="{{ [y]|as_data }}">
"""


def shown(text: str) -> str:
    return environment().from_string(TEMPLATE).render(x=text, y=text[:1000])


@settings(deadline=None, max_examples=300)
@given(st.one_of(st.text(max_size=300), st.text(alphabet="<>&\"'`=/{}%\u202e\x00", max_size=80)))
def test_any_text_is_shown_inert(text: str) -> None:
    is_inert(text)


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_text_is_shown_inert(number: int) -> None:
    is_inert(HOSTILE[number])


def is_inert(text: str) -> None:
    page = shown(text)
    page.encode()
    found = Elements(page)
    assert found.shape() == [("p", ("title",)), ("a", ("href",)), ("pre", ()), ("i", ("data-x",))]
    hidden = [c for c in found.text if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs", "Zl", "Zp")]
    assert hidden == []
    assert len(page) < 300_000


def test_what_is_hidden_is_named() -> None:
    assert visible("a\u202eb\x00") == "a\u27e8U+202E\u27e9b\u27e8U+0000\u27e9"
    assert visible("two\n\tlines") == "two\n\tlines"
    assert visible("\u05e9\u05dc\u05d5\u05dd e\u0301 \u4e2d") == "\u05e9\u05dc\u05d5\u05dd e\u0301 \u4e2d"
    assert visible("Z" + "\u0301" * 9) == "Z\u0301\u0301"


def test_a_long_text_is_cut_with_its_length_said() -> None:
    text = visible("x" * 1_048_576)
    assert text.startswith("x" * SHOWN_MAX)
    assert text.endswith("(1,048,576 characters in all)")
    assert one_line("a \n b" + "c" * 5_000).endswith("\u2026 (5,005 characters in all)")
    assert one_line("a \n b") == "a b"


def test_a_value_of_a_field_is_exact() -> None:
    assert exact("\u202e<") == "\u202e&lt;"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (None, "\u2013"),
        (0.0000042, "4.2 µs"),
        (0.0123, "12 ms"),
        (3.21, "3.2 s"),
        (75, "1 min 15 s"),
        (7200, "2 h"),
        (200_000, "2 d 7 h"),
    ],
)
def test_a_duration_has_two_units(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text
