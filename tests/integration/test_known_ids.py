"""The record's ids and the servers': `audit message`, lists, commands and the page, at every source; ids of no message."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
from support.brokers.each import EACH
from support.command_line import CommandLine, command_line_in
from support.queues import prepared_database
from support.web import OPERATOR, page_of, signed_in

from stormproof import FileSource, PostgresQueue, PostgresSink, Topology
from stormproof.core.base.failpoint import FailpointError, armed
from stormproof.core.contract.source import Lease, Limit
from stormproof.core.postgres.database import Database, connect
from stormproof.core.start.settings import Settings

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.5)]

NAME: Final = "known"
TEXTS: Final = ("fine", "bad", "refused", "pending")
"""Of each message, in their order; what is expected of it is `ENDS`."""
ENDS: Final = ("committed", "dead_letter", "rejected", "pending")
STRANGE: Final = (
    "0",
    "x",
    "0-",
    "-1",
    "0-00",
    "00-0",
    "0-\u0660",
    "\u0660-0",
    "0-1 ",
    "0 -1",
    "0--1",
    "+0-1",
    f"0-{2**63}",
)
"""Ids that no source shows so, and no server gave."""


def checked(line: str) -> list[str]:
    if "bad" in line:
        raise ValueError(line)
    return [line]


@dataclass(frozen=True, slots=True)
class Known:
    """A topology that has read four messages, and what its source's record and its server call them."""

    kind: str
    shown: tuple[str, ...]
    server: tuple[str | None, ...]
    never: tuple[str, ...]
    done: CommandLine
    database: Database

    def unknown(self, id_: str) -> str:
        """What is said of an id that is nobody's."""
        return str(self.done("audit", "message", NAME, id_, status=2)["error"]["message"])


def payload(number: int) -> bytes:
    return json.dumps({"id": f"m{number}", "text": TEXTS[number]}).encode()


def of_source(source: Any) -> tuple[str, ...]:
    """The ids of all messages, by a subscription that nobody else has."""
    source.subscribe("other", 1)
    found = list[str]()
    while (slice_ := source.open(Lease("other", 1), Limit(100), 7)) is not None:
        for reader in source.readers(slice_, 1):
            for batch in reader.read(7, frozenset(), 100):
                rows = batch.select(["id", "origin"]).to_pylist()
                found += [source.shown_id(row["id"], row["origin"]) for row in rows]
        source.confirm(Lease("other", 1))
    return tuple(found)


def here(database: Database, folder: Path, kind: str) -> tuple[Callable[[], Any], Callable[[list[bytes]], None]]:
    """Makes a source without a server, and puts into it."""
    if kind == "queue":

        def put_in_queue(lines: list[bytes]) -> None:
            with closing(PostgresQueue("here", database=database)) as queue:
                queue.put(lines)

        return lambda: PostgresQueue("here", database=database, max_attempts=1), put_in_queue
    given: dict[str, Any] = {"name": "here", "database": database, "max_attempts": 1, "look_interval_s": 0}
    places = iter(range(9))

    def put(lines: list[bytes]) -> None:
        (folder / f"{next(places)}.part").write_bytes(b"".join(line + b"\n" for line in lines))

    return lambda: FileSource(str(folder), "text", **given), put


@pytest.fixture(params=[*EACH, "queue", "files"])
def known(
    request: pytest.FixtureRequest,
    database: Database,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Known]:
    kind: str = request.param
    prepared_database(database)
    harness: Any = None
    sources: Callable[[], Any]
    put: Callable[[list[bytes]], Any]
    if kind in EACH:
        fixture, make = EACH[kind]
        harness = make(database, request.node.name, server=request.getfixturevalue(fixture))
        harness.options = {"id_from": "field:id"} if kind in ("rabbitmq", "kestrel") else {}
        sources, put = lambda: harness.unsubscribed(max_attempts=1), harness.put
    else:
        (tmp_path / "files").mkdir()
        sources, put = here(database, tmp_path / "files", kind)
    with connect(database, application_name="tests", autocommit=True) as connection:
        connection.execute("create table applied (line text check (line not like '%refused%'))")
    settings = Settings(database_url=database.adbc_uri, staging_dir=str(tmp_path / "staging"), rejects_max_share=1.0)

    def run() -> None:
        topology, source = Topology(NAME), sources()
        lines = topology.stream("lines", source).flat_map(checked, schema="line string")
        lines.into(PostgresSink("applied", database=database))
        with closing(source):
            topology.run("exactly-once", engine="inline", until_idle=True, settings=settings)

    put([payload(number) for number in range(3)])
    run()
    put([payload(3)])
    with pytest.raises(FailpointError), armed("commit.before_sink=error"):
        run()
    if kind in EACH:
        shown = tuple(f"0-{number}" for number in range(4))
    else:
        with closing(sources()) as source:
            shown = of_source(source)
    server, never = at_server(kind, harness)
    never = (*never, f"{shown[0].partition('-')[0]}-999", *(["7-1"] if kind != "files" else ["99-1"]))
    yield Known(
        kind, shown, server, never, command_line_in(tmp_path, database, "app.py", "", monkeypatch, capsys), database
    )
    if harness is not None:
        harness.close()


def at_server(kind: str, harness: Any) -> tuple[tuple[str | None, ...], tuple[str, ...]]:
    """What the server calls the four messages, and ids that look so and that it gave to none."""
    match kind:
        case "redis":
            with harness.server.client() as client:
                ids = tuple(id_.decode() for id_, _ in client.xrange(harness.name))
            return ids, (f"{ids[0].partition('-')[0]}-77", "1-1", f"1{ids[0]}", ids[0][1:])
        case "nats":
            return ("1", "2", "3", "4"), ("5", "01")
        case "rabbitmq" | "kestrel":
            return ("m0", "m1", "m2", "m3"), ("m4", "m", "0", "=m4")
        case "rabbitmq-stream":
            return ("0", "1", "2", "3"), ("4", "=4", "00")
        case "kafka":
            name = harness.name
            return tuple(f"{name}-0@{number}" for number in range(4)), (
                f"{name}-0@4",
                f"{name}-1@0",
                "other-0@0",
                f"{name}@0",
            )
        case _:
            return (None,) * 4, ()


def test_a_message_is_found_by_either_id_and_no_other_id_is_taken_for_one(known: Known) -> None:
    for number, end in enumerate(ENDS):
        shown, server = known.shown[number], known.server[number]
        for given in (shown, *([] if server is None else [server, f"={server}"])):
            found = known.done("audit", "message", NAME, given)
            assert (found["message"], found["server_id"], found["end"]["kind"]) == (shown, server, end), given
    for given in known.never:
        said = known.unknown(given)
        assert "none on record" in said or "knows it" in said or "no such message" in said or "ids look like" in said, (
            said
        )
    for given in set(STRANGE) - {*known.shown, *map(str, known.server)}:
        said = known.unknown(given) if not given.startswith(("-", "+")) else known.unknown(f" {given}")
        assert "none on record" in said or "ids look like" in said or "knows it" in said, said


def test_lists_show_the_servers_ids_and_commands_take_them(known: Known) -> None:
    done, (_, dead, reject, _), (_, dead_at, reject_at, _) = known.done, known.shown, known.server
    by = dead if dead_at is None else dead_at
    letter, refused = done("dead-letters", "list", NAME)["dead_letters"]
    assert (letter["id"], letter["server_id"]) == (dead, dead_at)
    assert by in done.text("dead-letters", "list", NAME)
    assert (refused["id"], refused["server_id"]) == (reject, reject_at)
    assert done("dead-letters", "list", NAME, "--sink", refused["sink"])["dead_letters"] == [refused]
    rows = {row["what"]: row for row in done("audit", "dead-letters", NAME)["rows"]}
    assert (rows["dead_letter"]["message"], rows["dead_letter"].get("server_id")) == (dead, dead_at)
    assert (rows["reject"]["message"], rows["reject"].get("server_id")) == (reject, reject_at)
    assert [row["message"] for row in done("audit", "dead-letters", NAME, "--message", by)["rows"]] == [dead]
    assert done("audit", "txn", NAME, "1")["server_ids"].get(dead) == dead_at
    assert (dead if dead_at is None else f"{dead} (its server: {dead_at})") in done.text("audit", "txn", NAME, "1")

    assert done("dead-letters", "show", NAME, by)["id"] == dead
    assert done("dead-letters", "requeue", NAME, by, "--dry-run")["would_requeue"] == [dead]
    assert done("dead-letters", "show", NAME, reject_at or reject)["id"] == reject
    assert done("dead-letters", "drop", NAME, reject_at or reject)["dropped"] == [reject]
    Path("new").write_text('{"id": "m1", "text": "mended"}')
    assert done("dead-letters", "edit", NAME, by, "--payload", "new")["edited"] == dead
    assert done.ended("dead-letters", "requeue", NAME, "0-99")[0] == 1, "it is no dead letter"


def test_the_page_finds_a_message_by_either_id(known: Known) -> None:
    app = page_of(known.database)
    browser = signed_in(app, OPERATOR)
    for shown, server in zip(known.shown, known.server, strict=True):
        for given in (shown, *([] if server is None else [f"={server}"])):
            answer = browser.get("/find", params={"q": given, "topology": NAME})
            assert answer.headers["location"].endswith(f"id={shown}"), given
            text = browser.get(answer.headers["location"]).text
            assert server is None or f"its server knows it as {server}" in text
    assert known.server[1] is None or known.server[1] in browser.get("/failures", params={"topology": NAME}).text
    assert browser.get("/find", params={"q": known.never[0], "topology": NAME}).status_code == 200
    app.close()
