"""What a notebook shows of a topology and of a run: tables of text, whatever stands in it."""

from __future__ import annotations

from html.parser import HTMLParser

from stormproof import MemorySink, MemorySource, Topology
from stormproof.trident.terms.observers import RunStatistics
from stormproof.trident.terms.wording import html_table
from stormproof.trident.topology.explain import Explanation


class Table(HTMLParser):
    """The texts of a table's cells, row by row, and the tags that it has."""

    def __init__(self, shown: str) -> None:
        super().__init__()
        self.rows: list[list[str]] = []
        self.tags: set[str] = set()
        self.feed(shown)

    def handle_starttag(self, tag: str, attrs: object) -> None:
        del attrs
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_data(self, data: str) -> None:
        if self.rows and self.rows[-1]:
            self.rows[-1][-1] += data


def shown(thing: RunStatistics | Explanation) -> Table:
    return Table(thing._repr_html_())  # pyright: ignore[reportPrivateUsage]


def test_what_stands_in_a_table_is_text() -> None:
    bad = '<script>alert(1)</script> & "quoted"'
    found = Table(html_table(bad, (bad,), [(bad,), (None,), (1_000_000,), (0.12345,)]))
    assert found.tags == {"table", "caption", "thead", "tbody", "tr", "th", "td"}
    assert found.rows == [[bad], [bad], [""], ["1,000,000"], ["0.123"]]


def test_statistics_show_the_figures_that_are_not_0() -> None:
    done = RunStatistics("words", "exactly-once", 3, batches=2, messages=1_500, failed=1, failed_by_reason={"error": 1})
    found = dict(shown(done).rows)
    assert (found["messages"], found["failed by reason"], found["stopped"]) == ("1,500", "{'error': 1}", "idle")
    assert "rejected" not in found
    assert dict(shown(RunStatistics("words", "exactly-once", 1)).rows)["messages"] == "0"


def test_an_explanation_shows_each_component_and_sink() -> None:
    topology = Topology("words")
    stream = topology.stream("lines", MemorySource("lines", [], schema="line string"))
    stream.map(str.upper, "line", schema="word string", name="upper").into(MemorySink("out"))
    found = shown(topology.explain()).rows
    assert [row[2] for row in found[1:]] == ["lines", "upper", "out"]
    assert all(len(row) == len(found[0]) for row in found)
