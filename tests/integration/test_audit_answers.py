"""The questions over one ledger with a history of everything: the command, the view and the page give one answer.

That answer is the one that follows from what was done, see `support.walked`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from html.parser import HTMLParser
from typing import Any, Final

import pytest
from starlette.testclient import TestClient
from support.operated import Operated
from support.walked import NAME, REJECTED, Walk, build
from support.web import READER, page_of, signed_in

from stormproof.trident.declarations.questions import QUESTIONS
from stormproof.trident.web.views.batch import WHY_HIDDEN

pytestmark = [pytest.mark.postgres]
Row = Mapping[str, Any]


@pytest.fixture
def walk(operated: Operated, monkeypatch: pytest.MonkeyPatch) -> Walk:
    """The history."""
    found = Walk(replace(operated, cell=replace(operated.cell, build=build)), monkeypatch)
    found.walk()
    return found


@pytest.fixture
def page(walk: Walk) -> Iterator[TestClient]:
    """A reader's browser at the page."""
    app = page_of(walk.run.cell.database)
    yield signed_in(app, READER)
    app.close()


ANSWERED: Final = [one.name for one in QUESTIONS.values() if one.order]
"""Questions with a command and a page that are made of their views."""

# -- what must be said, by what was done --------------------------------------------------------------------------------


def expected(walk: Walk) -> dict[str, list[dict[str, Any]]]:
    """The columns of each question's rows that follow from the history; `at` is the step in which it happened."""
    once, bad, worse = (walk.ids[line] for line in ("once 11", "bad", "worse"))

    def replay(message: str, failed_in: int, txid: int, error_class: str, at: str = "failures") -> dict[str, Any]:
        place = {"reason": "error", "component": "map", "error_class": error_class}
        return {"what": "message", "at": at, "message": message, "failed_in": failed_in, "txid": txid, **place}

    def letter(line: str, state: str) -> dict[str, Any]:
        why = {"decided_by": "ann", "decided_why": "because of letters", "decided_at": "letters"}
        counts = {"times_opened": 2, "times_failed": 2, "reason": "error", "error_class": "ValueError"}
        return {"what": "dead_letter", "message": walk.ids[line], "at": "failures", "state": state, **counts, **why}

    def reject(line: str, state: str, by: str | None) -> dict[str, Any]:
        place = {"sink": "strict", "txid": 4, "reason": REJECTED, "rows": 1}
        return {"what": "reject", "message": walk.ids[line], "at": "rejects", "state": state, "decided_by": by, **place}

    def action(word: str, at: str, txid: int | None = None, sink: str | None = None, line: str = "") -> dict[str, Any]:
        said = {"action": word, "by": "ann", "why": f"because of {at}", "message": walk.ids.get(line)}
        return {"at": at, "txid": txid, "sink": sink, **said}

    def suppressed(txid: int, sink: str, at: str) -> dict[str, Any]:
        evidence = f"the own record of sink {sink} has txid {txid}"
        return {"what": "batch", "at": at, "txid": txid, "sink": sink, "times": 1, "rows": 1, "evidence": evidence}

    def verdict(number: int, word: str, at: str, deep: bool, **kinds: int) -> dict[str, Any]:
        scope = {"first_txid": 1, "last_txid": 10, "txids": 10, "sinks": 2, "pruned_upto": 0, "unknowns": 0}
        always = {"skipped": 1, "rejected": 1}
        return {
            "id": number,
            "at": at,
            "by": "auditor",
            "verdict": word,
            "deep": deep,
            "kinds": always | kinds,
            **scope,
        }

    def blocked(what: str, txid: int, messages: int, at: str, cause: str | None) -> dict[str, Any]:
        return {
            "what": what,
            "txid": txid,
            "messages": messages,
            "attempts": 1,
            "sink": "strict",
            "at": at,
            "cause": cause,
        }

    of_postgres, of_delta = "a lost answer of Postgres", "a lost answer of Delta"
    aborted = {"txid": 5, "messages": 2, "at": "an aborted batch"}
    return {
        "replays": [
            *(replay(once, 2, 3, "KeyError"), replay(bad, 2, 3, "ValueError"), replay(worse, 2, 3, "ValueError")),
            replay(worse, 3, 9, "ValueError", "letters"),
            {"what": "batch", "reason": "driver_ended", **aborted},
        ],
        "duplicates": [
            suppressed(7, "strict", of_postgres),
            *(suppressed(8, sink, of_delta) for sink in ("strict", "lake")),
        ],
        # The message of the blocked batch is leased; the last two were never opened.
        "pending": [
            {
                **{"source": NAME, "kind": "queue", "leased": 1, "given_back": 0, "waiting": 0, "due": 0, "ready": 2},
                **{"undecided_dead_letters": 0, "oldest_txid": 11, "oldest_opened_at": "a blocked batch"},
            }
        ],
        "dead-letters": [
            *(letter("bad", "drop"), letter("worse", "edit")),
            *(reject("-22", "dropped", "ann"), reject("-21", "undecided", None)),
            {
                **{
                    "what": "skip",
                    "at": "a skipped batch",
                    "sink": "strict",
                    "txid": 10,
                    "reason": "skipped",
                    "rows": 2,
                },
                **{"state": "dropped", "decided_by": "ann"},
            },
        ],
        # 17 messages were opened by batches that count; the two of the aborted batch were opened again.
        "attempts": [
            {"what": "batch", "times": 1, "number": 11},
            {"what": "message", "times": 0, "number": 14},
            {"what": "message", "times": 1, "number": 1},
            {"what": "message", "times": 2, "number": 2},
        ],
        "recovered": [
            {"message": once, "failures": 1, "returns": 0, "last_in": 2, "committed_in": 3, "committed_at": "failures"},
            {"message": worse, "failures": 2, "returns": 0, "last_in": 3, "committed_in": 9, "committed_at": "letters"},
        ],
        "behind": [
            {
                "sink": sink,
                "held_txid": held,
                "newest_txid": 11,
                "behind_txids": 1,
                "behind_rows": 1,
                "blocked_txid": 11,
            }
            for sink, held in (("strict", 9), ("lake", 10))
        ],
        "aborted": [
            {"what": "aborted", "cause": "driver_ended", "sink": None, "attempts": 1, **aborted},
            *[blocked("was_blocked", 10, 2, "a skipped batch", None)] * 2,
            blocked("blocked", 11, 1, "a blocked batch", "sink_refused"),
        ],
        "actions": [
            action("adopt", "a new life"),
            *(action("edit", "letters", line="worse"), action("drop", "letters", line="bad")),
            action("drop_reject", "a dropped reject", 4, "strict"),
            *(action("retry", "a skipped batch", 10), action("skip", "a skipped batch", 10, "strict")),
            action("adopt_table", "an adopted table", None, "strict"),
        ],
        "verdicts": [
            # Both tables hold rows of the life before, too.
            verdict(1, "not_compared", "a clean check", deep=True, not_compared=2),
            # The changed digest is neither that of the recorded files nor that in the sink's own record.
            verdict(2, "violation", "a check of a changed record", deep=False, digest=1, evidence_differs=1),
        ],
    }


COMMITTED: Final[Mapping[str, tuple[list[tuple[int, str]], str]]] = {
    "1": ([(1, "lake strict")], "committed"),
    "3": ([(1, "lake strict")], "committed"),
    "10": ([(2, "lake strict")], "committed"),
    "once 11": ([(2, "failed"), (3, "lake strict")], "committed"),
    "bad": ([(2, "failed"), (3, "failed")], "dropped"),
    "worse": ([(2, "failed"), (3, "failed"), (9, "lake strict")], "committed"),
    "20": ([(4, "lake strict")], "committed"),
    "-21": ([(4, "lake")], "rejected"),
    "-22": ([(4, "lake")], "dropped"),
    "30": ([(5, "aborted"), (6, "lake strict")], "committed"),
    "40": ([(7, "lake strict")], "committed"),
    "41": ([(8, "lake strict")], "committed"),
    "51": ([(10, "lake")], "skipped"),
    "-60": ([(11, "blocked")], "pending"),
    "70": ([], "not_opened"),
}
"""Of each line: the batches that opened it with the sinks that hold it from there, or what became of it; and its end."""

TXNS: Final[Mapping[int, tuple[str, int, int, int, Mapping[str, tuple[int, str | None]]]]] = {
    1: ("committed", 3, 0, 0, {"strict": (3, "applied"), "lake": (3, "applied")}),
    2: ("committed", 4, 3, 0, {"strict": (1, "applied"), "lake": (1, "applied")}),
    3: ("committed", 3, 2, 3, {"strict": (1, "applied"), "lake": (1, "applied")}),
    4: ("committed", 3, 0, 0, {"strict": (3, "applied"), "lake": (3, "applied")}),
    5: ("aborted", 2, 0, 0, {}),
    6: ("committed", 2, 0, 0, {"strict": (2, "applied"), "lake": (2, "applied")}),
    7: ("committed", 1, 0, 0, {"strict": (1, "already_held"), "lake": (1, "applied")}),
    8: ("committed", 1, 0, 0, {"strict": (1, "already_held"), "lake": (1, "already_held")}),
    9: ("committed", 1, 0, 1, {"strict": (1, "applied"), "lake": (1, "applied")}),
    10: ("committed", 2, 0, 0, {"strict": (2, "skipped"), "lake": (2, "applied")}),
    11: ("blocked", 1, 0, 0, {"strict": (1, None), "lake": (1, None)}),
}
"""Of each batch: its state, messages, failed and replayed ones; of each sink the rows fixed for it, and how that ended."""


# -- how it is said ------------------------------------------------------------------------------------------------------


class Tables(HTMLParser):
    """The tables of a page, as lists of rows of cells' texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[list[list[str]]] = []
        self._cell: list[str] | None = None
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag == "table":
            self.found.append([])
        elif tag == "tr":
            self.found[-1].append([])
        elif tag in ("td", "th"):
            self._cell = []

    def handle_endtag(self, tag: str) -> None:
        if tag in ("td", "th") and self._cell is not None:
            self.found[-1][-1].append(" ".join("".join(self._cell).split()))
            self._cell = None

    def handle_data(self, data: str) -> None:
        if self._cell is not None:
            self._cell.append(data)

    def with_head(self, *names: str) -> list[dict[str, str]]:
        """The rows of the table whose head begins with these names."""
        for head, *rows in self.found:
            if tuple(head[: len(names)]) == names:
                return [dict(zip(head, row, strict=True)) for row in rows]
        return []


def tables(page: TestClient, path: str, **query: str | int) -> Tables:
    answer = page.get(path, params={"topology": NAME, **query})
    assert answer.status_code == 200
    return Tables(answer.text)


def rows_of(walk: Walk, question: str) -> list[dict[str, Any]]:
    """What the command says."""
    status = 1 if question in ("behind", "aborted", "verdicts") else 0
    found: list[dict[str, Any]] = walk.run.command("audit", question, NAME, status=status)["rows"]
    return found


def view_of(walk: Walk, view: str) -> list[dict[str, Any]]:
    """What the view says."""
    return [row for (row,) in walk.run.sql(f"select to_jsonb(v) from {view} v where topology = '{NAME}'")]


def plain(value: Any) -> Any:
    """A value in one form: times may be written in two."""
    match value:
        case dict():
            return {key: plain(one) for key, one in value.items()}
        case list():
            return [plain(one) for one in value]
        case str() if value[:2] == "20" and value[10:11] == "T":
            return datetime.fromisoformat(value).isoformat()
        case float() if value.is_integer():
            return int(value)
        case _:
            return value


def in_order(rows: Sequence[Row]) -> list[str]:
    return sorted(json.dumps(plain(dict(row)), sort_keys=True) for row in rows)


def is_time(name: str) -> bool:
    return name in ("at", "behind_since") or name.endswith("_at")


def cell_of(name: str, value: Any) -> str:
    """How a page writes a value in a cell."""
    match value:
        case None:
            return ""
        case bool():
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{key} {number}" for key, number in value.items())
        case list():
            return ", ".join(value)
        case str() if is_time(name):
            return datetime.fromisoformat(value).strftime("%Y-%m-%d %H:%M:%S")
        case str() if name == "digest":
            return value[:16]
        case str() if name in ("cause", "action", "what", "verdict"):
            return value.replace("_", " ")
        case _:
            return str(value)


# -- the questions -------------------------------------------------------------------------------------------------------


def answers_are_what_was_done(walk: Walk) -> None:
    for question, wanted in expected(walk).items():
        found = [stepped(walk, row) for row in rows_of(walk, question)]
        assert len(found) == len(wanted), question
        chosen = [{name: row.get(name) for name in one} for row, one in pairs(found, wanted)]
        assert in_order(chosen) == in_order(wanted), question


def stepped(walk: Walk, row: Row) -> dict[str, Any]:
    """A row with the history's steps for times."""
    return {
        name: walk.step_at(datetime.fromisoformat(value)) if is_time(name) and value else value
        for name, value in row.items()
    }


def pairs(found: Sequence[Row], wanted: Sequence[Row]) -> list[tuple[Row, Row]]:
    """Each row with an expected one that it agrees with in most columns."""
    left, matched = list(wanted), list[tuple[Row, Row]]()
    for row in found:
        best = max(left, key=lambda one: sum(row.get(name) == value for name, value in one.items()))
        left.remove(best)
        matched.append((row, best))
    return matched


def views_say_what_commands_say(walk: Walk) -> None:
    for question in ANSWERED:
        view = view_of(walk, QUESTIONS[question].view)
        names = view[0].keys()
        found = [{name: row[name] for name in names} for row in rows_of(walk, question)]
        assert in_order(found) == in_order(view), question


def the_page_says_what_commands_say(walk: Walk, page: TestClient) -> None:
    for question in ANSWERED:
        if QUESTIONS[question].page != "question":
            continue  # they have views of their own
        shown = tables(page, "/question", name=question).with_head("topology")
        found = rows_of(walk, question)
        assert len(shown) == len(found), question
        for row, cells in zip(found, shown, strict=True):
            for name, value in row.items():
                if name in ("took_ms", "oldest_ready_age_s", "reason"):
                    continue  # a span, and a text that may be cut
                assert cells.get(name.replace("_", " "), "") == cell_of(name, value), (question, name)
            if row.get("reason"):
                assert question != "aborted" or cells["reason"] == WHY_HIDDEN


def the_views_of_replays_and_failures_say_it_too(walk: Walk, page: TestClient) -> None:
    shown = tables(page, "/replays")
    found = rows_of(walk, "replays")
    assert Counter(
        (row["What"], row["Reason"], row["Component"], row["Failed in"], row["Opened again in"], row["When, UTC"])
        for row in shown.with_head("What", "Reason", "Component")
    ) == Counter(
        (
            row["message"] or f"{row['what']} {row['attempt']}",
            row["error_class"] or row["reason"],
            *(cell_of(name, row[name]) for name in ("component", "failed_in", "txid", "at")),
        )
        for row in found
    )
    counted = {
        (row["What"], row["Class"]): int(row["Number"]) for row in shown.with_head("Reason", "Class", "Component")
    }
    assert counted == Counter((row["what"], row["error_class"] or "") for row in found)
    words = {"edit": "edited", "drop": "dropped"}
    assert [
        (row["Message"], row["What"], row["Class"], row["Where"], row["State"], row["Failed"], row["When, UTC"])
        for row in tables(page, "/failures", state="any").with_head("Message", "What")
    ] == [
        (
            *(row["message"] or "all rows of the batch", row["what"].replace("_", " "), row["error_class"]),
            str(row["sink"] or row["source"]) + (f" in {row['txid']}" if row["txid"] else ""),
            words.get(str(row["state"]), str(row["state"])) + (f" by {row['decided_by']}" if row["decided_by"] else ""),
            *(cell_of("times_failed", row["times_failed"]), cell_of("at", row["at"])),
        )
        for row in rows_of(walk, "dead-letters")
    ]
    undecided = [row for row in rows_of(walk, "dead-letters") if row["state"] == "undecided"]
    listed = tables(page, "/failures").with_head("Message", "What")
    assert [row["Message"] for row in listed] == [row["message"] for row in undecided]


def each_message_has_one_history(walk: Walk, page: TestClient) -> None:
    entries = view_of(walk, "stormproof.audit_message")
    for line, (openings, end) in COMMITTED.items():
        message = walk.ids[line]
        said = walk.run.command("audit", "message", NAME, message)
        assert said["end"]["kind"] == end, line
        told = [
            (one["txid"], " ".join(sorted(held["sink"] for held in one["held"])) or _instead(one))
            for one in said["openings"]
        ]
        assert told == openings, line
        shown = tables(page, "/message", id=message).with_head("Txid", "State")
        assert [int(row["Txid"]) for row in shown] == [txid for txid, _ in openings]
        for row, one in zip(shown, said["openings"], strict=True):
            held = [
                f"held by {sink['sink']}" + ("" if sink["version"] is None else f" version {sink['version']}")
                for sink in one["held"]
            ]
            held += [f"{other['sink']} {other['has'].replace('_', ' ')}" for other in one["not_held"]]
            held += [f"given up at {given_up['sink']}" for given_up in one["skipped"]]
            assert row["What became of it there"] == (" ".join(held) or _instead(one)), line
        mine = [entry for entry in entries if entry["message"] == message]
        failed = [(one["txid"], one["attempt"], one["component"]) for one in said["failures"]]
        in_view = [entry for entry in mine if entry["what"] == "failure"]
        assert sorted((entry["txid"], entry["attempt"], entry["component"]) for entry in in_view) == failed, line
        # The view has the tables' versions of each opening again, the command of the first one, too.
        for entry in (entry for entry in mine if entry["what"] == "replay"):
            (opening,) = [one for one in said["openings"] if one["txid"] == entry["txid"]]
            assert {sink: held["version"] for sink, held in (entry["held"] or {}).items()} == {
                held["sink"]: held["version"] for held in opening["held"]
            }, line
        # A skip is of a whole batch: the view of messages has no row for each of them, that of dead letters has one.
        decided = [(one["action"], one["by"], one["why"]) for one in said["operator"] if one["action"] != "skip"]
        assert [(e["action"], e["by"], e["why"]) for e in mine if e["what"] == "operator"] == decided, line


def _instead(opening: Row) -> str:
    return "failed" if opening["failed"] else str(opening["state"])


def each_batch_has_one_story(walk: Walk, page: TestClient) -> None:
    view = {row["txid"]: row for row in view_of(walk, "stormproof.audit_txn")}
    assert view.keys() == TXNS.keys()
    for txid, (state, messages, failed, replayed, sinks) in TXNS.items():
        said = walk.run.command("audit", "txn", NAME, str(txid))
        assert (said["state"], said["messages"], said["failed"], len(said["replayed"])) == (
            *(state, messages, failed, replayed),
        )
        assert {sink["sink"]: (sink["rows"], sink["outcome"]) for sink in said["sinks"]} == sinks, txid
        row = view[txid]
        for name in (
            "state",
            "cause",
            "guarantee",
            "epoch",
            "source",
            "messages",
            "failed",
            "tuples",
            "bytes",
            "retry",
        ):
            assert row[name] == said[name], (txid, name)
        for sink in said["sinks"]:
            held = (row["sinks"] or {})[sink["sink"]]
            assert {name: held[name] for name in ("rows", "bytes", "digest", "outcome", "version")} == {
                name: sink[name] for name in ("rows", "bytes", "digest", "outcome", "version")
            }
            assert held["previous"] == sink["follows_txid"]
        shown = tables(page, "/batch", txid=txid).with_head("Sink", "Evidence")
        assert [
            (cells["Evidence"], cells["Rows"], cells["Follows"], cells["Digest"], cells["Held since, UTC"])
            for cells in shown
        ] == [
            (
                (sink["outcome"] or sink["has"]).replace("_", " "),
                str(sink["rows"]) + (f" {sink['rejected']} rejected" if sink["rejected"] else ""),
                str(sink["follows_txid"] or "first"),
                sink["digest"][:16],
                cell_of("at", sink["committed_at"]),
            )
            for sink in said["sinks"]
        ], txid


def test_command_view_and_page_give_the_answer_that_follows_from_what_was_done(
    walk: Walk, page: TestClient, subtests: pytest.Subtests
) -> None:
    """One test, since the history takes seconds."""
    with subtests.test("answers are what was done"):
        answers_are_what_was_done(walk)
    with subtests.test("views say what commands say"):
        views_say_what_commands_say(walk)
    with subtests.test("the page says what commands say"):
        the_page_says_what_commands_say(walk, page)
    with subtests.test("replays and failures"):
        the_views_of_replays_and_failures_say_it_too(walk, page)
    with subtests.test("each message"):
        each_message_has_one_history(walk, page)
    with subtests.test("each batch"):
        each_batch_has_one_story(walk, page)
    with subtests.test("control: another answer in the record is seen"):
        walk.run.sql("update stormproof.txn set cause = 'job_failed' where txid = 5")
        with pytest.raises(AssertionError):
            answers_are_what_was_done(walk)
