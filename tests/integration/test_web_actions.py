"""Decisions on the page, over real ledgers: looked at, confirmed, done once, on record; and refused where they must be."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from support.crashes import KILLED, Cell, run_driver
from support.deciding import Deciding, Shown, said
from support.operated import Operated
from support.rejecting import BAD, STRICT
from support.rejecting import build as rejecting_topology
from support.topologies import POISON, SinkMode, expected, messages, table_of
from support.web import OPERATOR, READER, page_of, post, signed_in

from stormproof.core.base.errors import SinkRefused
from stormproof.trident.decisions.stores import Stores
from stormproof.trident.ledger.graphs import SHOWN_CHARACTERS
from stormproof.trident.web.app import ROUTES
from stormproof.trident.web.mount import WebApp
from stormproof.trident.web.people import WebRole, WebUser
from stormproof.trident.web.proposals import DecisionOutcome, Given
from stormproof.trident.web.views.decisions import act

pytestmark = [pytest.mark.postgres, pytest.mark.sampled(0.5)]

NAME = "paged"
APPEND = SinkMode.POSTGRES_APPEND
DEAD = 4


PAGES: list[WebApp] = []


@pytest.fixture(autouse=True)
def pages_are_closed() -> Generator[None]:
    yield
    while PAGES:
        PAGES.pop().close()


def page(operated: Operated) -> WebApp:
    PAGES.append(page_of(operated.cell.database))
    return PAGES[-1]


def deciding(operated: Operated, user: WebUser = OPERATOR, app: WebApp | None = None) -> Deciding:
    return Deciding(signed_in(app or page(operated), user), operated.cell.name)


def actions(operated: Operated) -> list[tuple[Any, ...]]:
    """What operators decided: what, who, why."""
    return operated.sql('select action, "by", why from stormproof.audit_actions order by at, action, message')


def words(operated: Operated) -> Counter[str]:
    return Counter(word for (word,) in operated.sql(f"select word from {table_of(APPEND, NAME)}"))


# -- dead letters ------------------------------------------------------------------------------------------------------


@pytest.fixture
def dead(operated: Operated) -> Operated:
    """A few dead letters, and a message that was fine."""
    operated = replace(operated, cell=replace(operated.cell, mode=APPEND, batch_messages=50))
    operated.put(b"good one", *[POISON] * DEAD)
    operated.run()
    return operated


def refuse_start(dead: Operated, fingerprint: str) -> None:
    """As if a start had been refused until this change is accepted."""
    dead.sql(
        "insert into stormproof.event (incarnation, at, kind, error, detail) select incarnation, now(), 'start_refused', "
        f"'column n was added', json_build_object('fingerprint', '{fingerprint}') from stormproof.topology"
    )


def ids(dead: Operated) -> list[str]:
    return [one["id"] for one in dead.command("dead-letters", "list", NAME)["dead_letters"]]


def test_selected_dead_letters_are_requeued_once_and_on_record(dead: Operated) -> None:
    person = deciding(dead)
    first, second, *others = ids(dead)
    shown = person.select("requeue", first, second)
    assert (shown.count, "ValueError" in shown.text) == (2, True)
    text = person.confirm(shown, why="repaired")
    assert f"{NAME}: 2 dead letters requeued by olaf" in text
    assert person.confirm(shown, why="a second click") == text
    assert said(person.browser.get(shown.address, follow_redirects=True).text) == text, "the browser's back button"
    assert actions(dead) == [("requeue", "olaf", "repaired")] * 2
    assert ids(dead) == others
    dead.run()
    dead.verify()


def test_all_that_match_are_those_that_were_counted(dead: Operated) -> None:
    """Somebody else decides about one meanwhile, and others die: neither is touched, and both are said."""
    person = deciding(dead)
    shown = person.look("drop", error_class="ValueError")
    assert shown.count == DEAD
    assert "dead-letters drop paged --error-class ValueError" in shown.text
    dead.command("dead-letters", "requeue", NAME, ids(dead)[0], "--by", "ann")
    dead.put(POISON)
    dead.run()  # the requeued one dies again, and so does the new one
    text = person.confirm(shown, why="test messages")
    assert said(person.browser.get(shown.address, follow_redirects=True).text) == text, "the browser's back button"
    assert f"{DEAD} dead letters dropped by olaf" in text or f"{DEAD - 1} dead letters dropped by olaf" in text
    assert "1 dead letter more came to match: not touched" in text
    assert len(ids(dead)) == 1


def test_an_empty_filter_needs_an_express_all(dead: Operated) -> None:
    person = deciding(dead)
    shown = person.look("drop")
    assert (shown.proposal, "Nothing is chosen yet" in shown.text) == (None, True)
    assert "only one of these" in person.look("drop", all="1", reason="error").text
    assert person.look("drop", error_class="KeyError").proposal is None
    assert person.look("drop", since="yesterday?").proposal is None
    shown = person.look("drop", all="1")
    assert (shown.count, "given up for good" in shown.text) == (DEAD, True)
    person.confirm(shown)
    assert ids(dead) == []
    assert [action for action, _, _ in actions(dead)] == ["drop"] * DEAD


def test_an_edited_message_keeps_its_line_ends(dead: Operated) -> None:
    person = deciding(dead)
    message, other = ids(dead)[:2]
    shown = person.look("edit", id=message)
    assert POISON.decode() in shown.text
    text = person.confirm(shown, payload="mended\r\ntwice", why="a typo")
    assert f"{message} is handed out again with its new payload" in text
    assert dead.sql("select new_payload from stormproof.dead_letter where disposal = 'edit'") == [(b"mended\ntwice",)]
    assert "was edited" in person.look("edit", id=message).text
    assert "the payload is the old one" in person.confirm(
        person.look("edit", id=other), payload=POISON.decode(), why="no change"
    )
    dead.run()
    assert words(dead) == expected([b"good one", b"mended", b"twice"])
    dead.verify()


def test_a_canary_without_a_driver_is_refused_and_hands_nothing_out(dead: Operated) -> None:
    person = deciding(dead)
    assert "no driver of 'paged' runs" in person.confirm(person.look("requeue", all="1"), canary="2")
    assert "a canary: say how many" in person.confirm(person.look("requeue", all="1"), max_failures="0.5")
    wrong = person.send(person.look("requeue", all="1"), canary="two")
    assert (wrong.status_code, "Canary: first: &#39;two&#39; is no number" in wrong.text) == (400, True)
    assert len(ids(dead)) == DEAD


def test_the_one_time_token_has_no_name_so_a_decision_asks_for_one(dead: Operated) -> None:
    person = deciding(dead, WebUser("", WebRole.OPERATOR))
    shown = person.look("drop", all="1")
    assert person.send(shown, why="x").status_code == 400
    assert len(ids(dead)) == DEAD
    person.confirm(shown, by="ada", why="x")
    assert {by for _, by, _ in actions(dead)} == {"ada"}


# -- rejects -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def rejecting(operated: Operated) -> Operated:
    """A sink has rejected two messages, and would take them now."""

    def build(cell: Cell) -> Any:
        return rejecting_topology(cell)

    operated = replace(
        operated, cell=replace(operated.cell, name="rejecting", build=build, mode=None, batch_messages=100)
    )
    operated.run(build(operated.cell))
    operated.sql(f"alter table {STRICT} add constraint rule check (word <> '{BAD}')")
    operated.put(b"a b", b"bad c", b"bad d", *[b"e"] * 40)
    assert operated.run(build(operated.cell)).rejected == 2
    operated.sql(f"alter table {STRICT} drop constraint rule")
    return operated


def test_rejects_are_retried_and_dropped(rejecting: Operated) -> None:
    person = deciding(rejecting)
    shown = person.look("requeue", sink="strict", error_class="23")
    assert (shown.count, "23514" in shown.text) == (2, True)
    (first, second) = [one["id"] for one in rejecting.command("dead-letters", "list", "rejecting")["dead_letters"]]
    assert "1 dead letter dropped by olaf" in person.confirm(person.select("drop", second), why="a test message")
    text = person.confirm(shown, why="the rule is gone")
    assert "1 dead letter requeued by olaf" in text
    assert "1 dead letter of these was decided about by others: left alone" in text
    rejecting.run(rejecting_topology(rejecting.cell))
    assert rejecting.sql("select message, state from stormproof.reject order by id") == [
        (first, "retried"),
        (second, "dropped"),
    ]
    assert [(action, by) for action, by, _ in actions(rejecting)] == [("drop_reject", "olaf"), ("retry_reject", "olaf")]
    rejecting.verify()


# -- a batch that cannot go on -----------------------------------------------------------------------------------------


@pytest.fixture
def blocked(operated: Operated, monkeypatch: pytest.MonkeyPatch) -> Operated:
    """Txid 1 is blocked: a table refuses a row of it."""
    monkeypatch.setenv("STORMPROOF_REJECTS_MAX_SHARE", "0")
    operated = replace(operated, cell=replace(operated.cell, mode=APPEND))
    operated.put(*messages(9))
    assert run_driver(operated.cell, "prepare.after=kill") == KILLED
    operated.sql(f"alter table {table_of(APPEND, NAME)} add constraint no_m1 check (word <> 'm1')")
    with pytest.raises(SinkRefused):
        operated.run()
    return operated


def test_a_blocked_batch_is_retried_after_the_repair(blocked: Operated) -> None:
    person = deciding(blocked)
    shown = person.look("retry", txid=1)
    assert "no_m1" in shown.text
    blocked.sql(f"alter table {table_of(APPEND, NAME)} drop constraint no_m1")
    assert "txid 1 of paged is prepared again" in person.confirm(shown, why="constraint dropped")
    assert "only a blocked one can be retried" in person.look("retry", txid=1).text
    blocked.run()
    assert words(blocked) == expected(messages(9))
    assert actions(blocked) == [("retry", "olaf", "constraint dropped")]


def test_a_sink_is_skipped_for_a_blocked_batch(blocked: Operated) -> None:
    person = deciding(blocked)
    shown = person.look("skip", txid=1, sink=APPEND)
    (rows,) = blocked.sql("select rows from stormproof.txn_sink where txid = 1")[0]
    assert shown.count == rows > 0
    assert f"its {rows} rows for sink {APPEND} are rejects now" in person.confirm(shown, why="m1 is wrong")
    assert "skipped already" in person.look("skip", txid=1, sink=APPEND).text
    blocked.sql(f"alter table {table_of(APPEND, NAME)} drop constraint no_m1")
    blocked.run()
    assert words(blocked).total() == expected(messages(9)).total() - rows
    assert actions(blocked) == [("skip", "olaf", "m1 is wrong")]


def test_only_the_refused_rows_are_skipped(blocked: Operated) -> None:
    person = deciding(blocked)
    assert "that its table refuses" in person.do("skip-rows", txid=1, sink=APPEND)
    assert 0 < words(blocked).total() < expected(messages(9)).total()
    blocked.sql(f"alter table {table_of(APPEND, NAME)} drop constraint no_m1")
    blocked.run()
    blocked.verify()


def test_what_changed_since_it_was_shown_is_not_decided(blocked: Operated) -> None:
    person = deciding(blocked)
    shown = person.look("skip", txid=1, sink=APPEND)
    blocked.command("ledger", "skip", NAME, "1", APPEND, "--by", "ann")
    assert "skipped already" in person.confirm(shown)
    assert [by for _, by, _ in actions(blocked)] == ["ann"]


# -- starts, tables, the ledger, the driver ----------------------------------------------------------------------------


def test_decisions_about_starts_and_tables_are_on_record(dead: Operated) -> None:
    person = deciding(dead)
    assert "Fill in what it is about: Incarnation." in person.look("adopt").text
    assert "names no incarnation" in person.look("adopt", incarnation="no such/thing/at all").text
    assert "which stay as they are" in person.do("adopt", incarnation="old/0123abcd")
    assert "is the fingerprint of no change" in person.look("accept-change", fingerprint="xyz").text
    refuse_start(dead, "0123456789ab")
    assert "column n was added" in person.look("accept-change", fingerprint="0123456789ab").text
    assert "may start with the change" in person.do("accept-change", fingerprint="0123456789ab")
    assert "is that of sink" in person.do("adopt-table", sink=APPEND)
    assert "its table is in use" in person.look("release-table", sink=APPEND).text
    assert "no table behind sink" in person.look("adopt-table", sink="nowhere").text
    assert {action for action, _, _ in actions(dead)} >= {"adopt", "accept_change"}


def test_what_a_server_lost_is_accepted_once_it_was_shown(dead: Operated) -> None:
    person = deciding(dead)
    assert "nothing is on record" in person.look("accept-loss").text
    look = '["unknown", "it cannot be told", 0, "1", "2", 0, "2026-01-01T00:00:00+00:00", ""]'
    dead.sql(f"update stormproof.pending_subscription set position = position || '{{\"breaks\": [{look}]}}'")
    shown = person.look("accept-loss")
    assert "it cannot be told" in shown.text
    assert "accepted, on record" in person.confirm(shown, why="the server was never down")
    assert "nothing is on record" in person.look("accept-loss").text
    assert actions(dead) == [("accept_loss", "olaf", "the server was never down")]


def test_the_ledger_is_pruned(dead: Operated) -> None:
    person = deciding(dead)
    assert "Nothing is old enough" in person.look("prune").text
    assert "is no age" in person.look("prune", older_than="soon").text
    dead.command("dead-letters", "drop", NAME, "--all")
    dead.put(b"x")
    dead.run()
    dead.sql("update stormproof.txn set ended_at = ended_at - interval '40 days'")
    shown = person.look("prune", older_than="30d")
    assert shown.count is not None
    assert "pruned up to txid" in person.confirm(shown, why="for a test")
    assert ("prune", "olaf", "for a test") in actions(dead)


def test_a_pause_is_asked_for_once_however_often_its_form_is_sent(dead: Operated) -> None:
    person = deciding(dead)
    shown = person.look("pause")
    assert "no driver runs; the next one opens no batch" in person.confirm(shown, why="the lake is moved")
    assert "opens batches again" in person.do("resume")
    person.confirm(shown, why="a reload")
    assert dead.sql("select paused, by, why from stormproof.control") == [(False, "olaf", "for a test")]
    assert "nothing to resume" in person.look("resume").text
    assert "nothing to stop" in person.look("stop").text
    assert "nothing is drained" in person.look("drain").text
    assert [action for action, _, _ in actions(dead)] == ["pause", "resume"]


# -- where they stand --------------------------------------------------------------------------------------------------


def test_views_lead_an_operator_to_decisions_and_a_reader_to_none(dead: Operated) -> None:
    app = page(dead)
    (first, *_) = ids(dead)
    leads = {
        f"/topology?topology={NAME}": ("action=pause", "action=adopt-table", "action=prune"),
        f"/failures?topology={NAME}": ("action=requeue", 'value="drop"', f'value="{first}"'),
        f"/failure?topology={NAME}&id={first}": ("action=requeue", "action=edit", "action=drop"),
    }
    for user, sees in ((OPERATOR, True), (READER, False)):
        browser = signed_in(app, user)
        for address, wanted in leads.items():
            answer = browser.get(address)
            assert answer.status_code == 200, said(answer.text)
            text = answer.text.replace("&amp;", "&")
            assert [one in text for one in wanted] == [sees] * len(wanted), address
            said(text)


def offered(person: Deciding, address: str) -> set[str]:
    """The decisions that a view offers, each with the sink that it names."""
    text = person.browser.get(address).text.replace("&amp;", "&")
    return {
        "".join(one)
        for one in re.findall(r"/decide\?action=([a-z-]+)&topology=[a-z]+(?:&txid=\d+)?(&sink=[\w-]+)?", text)
    }


BATCH = f"/batch?topology={NAME}&txid=1"
TOPOLOGY = f"/topology?topology={NAME}"


def test_a_blocked_batchs_view_leads_to_its_retry_and_skips(blocked: Operated) -> None:
    person = deciding(blocked)
    assert offered(person, BATCH) == {"retry", f"skip&sink={APPEND}", f"skip-rows&sink={APPEND}"}
    assert offered(person, TOPOLOGY) >= {"retry", "pause"}
    assert f"/batch?topology={NAME}&txid=1" in person.browser.get(TOPOLOGY).text.replace("&amp;", "&")


def test_only_the_sink_that_refuses_a_batch_can_be_skipped(operated: Operated, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one that holds it, nor one that would take it; and a Delta table cannot be given a part of the rows."""
    monkeypatch.setenv("STORMPROOF_REJECTS_MAX_SHARE", "0")
    operated.put(*messages(9))
    assert run_driver(operated.cell, "prepare.after=kill") == KILLED
    operated.sql(f"alter table {table_of(APPEND, NAME)} add constraint no_m1 check (word <> 'm1')")
    person = deciding(operated)
    assert offered(person, BATCH) == set(), "it is merely prepared, and goes on by itself"
    assert "is not blocked" in person.look("skip", txid=1, sink=APPEND).text
    with pytest.raises(SinkRefused):
        operated.run()
    assert offered(person, BATCH) == {"retry", f"skip&sink={APPEND}", f"skip-rows&sink={APPEND}"}
    for sink in set(SinkMode) - {APPEND}:
        for action in ("skip", "skip-rows"):
            shown = person.look(action, txid=1, sink=sink)
            assert (shown.proposal, "holds it already" in shown.text or "has not refused it" in shown.text) == (
                None,
                True,
            )
    operated.sql("update stormproof.event set sink = 'delta-append' where kind = 'blocked'")
    operated.sql("update stormproof.txn_sink set committed_at = null where sink = 'delta-append'")
    assert offered(person, BATCH) == {"retry", "skip&sink=delta-append"}
    assert "is no Postgres table" in person.look("skip-rows", txid=1, sink="delta-append").text
    assert actions(operated) == []


def test_a_skip_that_was_confirmed_once_the_batch_went_on_does_nothing(blocked: Operated) -> None:
    person = deciding(blocked)
    shown = person.look("skip", txid=1, sink=APPEND)
    blocked.command("retry", NAME, "1", "--by", "ann")
    assert "is not blocked: the next start" in person.confirm(shown)
    assert [by for _, by, _ in actions(blocked)] == ["ann"]


def test_a_topologys_view_offers_only_what_there_is_something_to_decide_about(dead: Operated) -> None:
    person = deciding(dead)
    assert {"requeue", "drop"} <= offered(person, TOPOLOGY)
    assert offered(person, TOPOLOGY) & {f"release-table&sink={APPEND}"} == set()
    dead.command("dead-letters", "drop", NAME, "--all")
    assert offered(deciding(dead), TOPOLOGY) & {"requeue", "drop"} == set()


# -- who may not -------------------------------------------------------------------------------------------------------

FORGED: Mapping[str, tuple[WebUser, str | None, Mapping[str, str]]] = {
    "a reader": (READER, None, {}),
    "no token": (OPERATOR, "", {}),
    "another's token": (OPERATOR, "0" * 64, {}),
    "another site": (OPERATOR, None, {"origin": "https://evil.example", "sec-fetch-site": "cross-site"}),
}


@pytest.mark.parametrize("who", FORGED)
def test_a_request_that_may_not_decide_changes_nothing(dead: Operated, who: str) -> None:
    user, token, headers = FORGED[who]
    app = page(dead)
    shown = deciding(dead, app=app).look("drop", all="1")
    before = dead.sql("select * from stormproof.audit_actions")
    browser = signed_in(app, user)
    for route in ROUTES:
        if route.method == "POST" and route.role is WebRole.OPERATOR:
            fields = {"proposal": shown.proposal, "action": "drop", "topology": NAME, "all": "1", "by": "eve"}
            answer = post(browser, route.path, fields, token=token, headers=headers)
            assert answer.status_code == 403, route.name
    assert dead.sql("select * from stormproof.audit_actions") == before
    assert len(ids(dead)) == DEAD


def test_a_proposal_is_confirmed_by_the_one_who_saw_it(dead: Operated) -> None:
    app = page(dead)
    shown = deciding(dead, app=app).look("drop", all="1")
    answer = deciding(dead, app=app).send(shown)
    assert (answer.status_code, "not known here" in said(answer.text)) == (409, True)
    answer = deciding(dead, app=app).send(Shown(200, "", "unknown", None))
    assert answer.status_code == 409
    assert len(ids(dead)) == DEAD


def test_hostile_names_are_shown_inert(dead: Operated) -> None:
    hostile = "<script>alert(1)</script>\u202e\x00\"'&"
    person = deciding(dead)
    for action in ("requeue", "pause", "skip", "adopt"):
        for name in ("topology", "source", "txid", "incarnation", "id", "match"):
            answer = person.browser.get("/decide", params={"action": action, "topology": NAME, name: hostile})
            assert answer.status_code in (200, 404)
            said(answer.text)
            assert not re.search(r"<script>alert", answer.text)


# -- once, over processes ----------------------------------------------------------------------------------------------


def confirmations(operated: Operated) -> list[tuple[Any, ...]]:
    return operated.sql('select action, "by" from stormproof.confirmation order by at')


def test_a_form_that_was_confirmed_is_known_after_the_page_was_started_anew(dead: Operated) -> None:
    person = deciding(dead)
    shown, other = person.look("requeue", all="1"), person.look("drop", all="1")
    person.confirm(shown, why="repaired")
    assert confirmations(dead) == [("requeue", "olaf")]
    PAGES.pop().close()
    anew = deciding(dead)
    answer = anew.send(shown, why="a click that was late")
    assert answer.status_code == 409
    assert "Done already: Requeue dead letters" in said(answer.text)
    assert re.search(r"It was confirmed before, by olaf at \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", said(answer.text))
    assert "Done already" in said(anew.browser.get("/decided", params={"proposal": shown.proposal}).text)
    answer = anew.send(other)
    assert (answer.status_code, "nothing of it was done" in said(answer.text)) == (409, True)
    assert actions(dead) == [("requeue", "olaf", "repaired")] * DEAD


class TwoProcesses:
    """Two pages that have the same form in hand: as if each had shown it."""

    def __init__(self, operated: Operated) -> None:
        refuse_start(operated, "0" * SHOWN_CHARACTERS)
        first, second = page(operated), page(operated)
        person = deciding(operated, app=first)
        self.shown = person.look("accept-change", fingerprint="0" * SHOWN_CHARACTERS)
        assert self.shown.proposal is not None
        self.given = Given("olaf", "again", {})
        (mine,) = first.site.proposals._kept.values()  # pyright: ignore[reportPrivateUsage]
        self.proposals = [mine, replace(mine, outcome=None)]
        opened = second.site.reader.opened()
        self.stores = Stores(opened.settings, opened.database, opened.engine)

    def outcomes(self) -> list[DecisionOutcome]:
        """Both are sent at once."""
        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(lambda one: act(self.stores, one, self.given), self.proposals))


def test_one_form_sent_to_two_processes_at_once_is_acted_on_once(dead: Operated) -> None:
    two = TwoProcesses(dead)
    done, refused = sorted(two.outcomes(), key=lambda one: not one.ok)
    assert (done.ok, refused.ok) == (True, False)
    assert "It was confirmed before, by olaf" in refused.lines[0]
    assert [action for action, _, _ in actions(dead)] == ["accept_change"]


def test_control_without_the_ledgers_record_both_act(dead: Operated) -> None:
    two = TwoProcesses(dead)
    first, second = two.proposals
    assert act(two.stores, first, two.given).ok
    dead.sql("delete from stormproof.confirmation")
    assert act(two.stores, second, two.given).ok
    assert [action for action, _, _ in actions(dead)] == ["accept_change"] * 2


def test_a_decision_that_fails_leaves_no_confirmation(dead: Operated) -> None:
    person = deciding(dead)
    shown = person.look("drop", all="1")
    dead.sql("alter table stormproof.dead_letter add constraint no check (disposal is null) not valid")
    with suppress(Exception):
        person.send(shown, why="it cannot")
    assert confirmations(dead) == []
    assert len(ids(dead)) == DEAD
