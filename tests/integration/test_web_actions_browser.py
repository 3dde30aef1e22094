"""Decisions in a real browser: with a driver that runs, one that is killed, and a batch that is blocked."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from support.brokers import until
from support.browser import SCREENS, WAIT_S, Screen, browsing, needs_browser
from support.command_line import command_line_in
from support.driven import FILE, NAME, Driven
from support.queues import prepared_database

from stormproof.core.postgres.database import Database

pytestmark = [pytest.mark.postgres, needs_browser]


class Person:
    """Somebody at the page, in a browser of their own."""

    def __init__(self, screen: Screen) -> None:
        self.screen = screen
        self.chrome: Any = screen.chrome
        self.address = screen.address

    def look(self, action: str, **params: object) -> str:
        """Go to a decision's page; what it says."""
        from urllib.parse import urlencode

        self.chrome.get(f"{self.address}decide?{urlencode({'action': action, 'topology': NAME, **params})}")
        return self.text()

    def text(self) -> str:
        return " ".join(str(self.chrome.find_element("tag name", "main").text).split())

    def fill(self, name: str, value: str) -> None:
        field = self.chrome.find_element("name", name)
        field.clear()
        field.send_keys(value)

    def confirm(self, why: str, **fields: str) -> str:
        """Fill in the confirmation and send it with a double click; what became of it."""
        for name, value in {"by": "ada", "why": why, **fields}.items():
            self.fill(name, value)
        form = "form[action$='/decide/confirm'] button"
        self.chrome.execute_script(
            "const b = document.querySelector(arguments[0]); const f = b.form; b.click(); f.requestSubmit();", form
        )
        until(lambda: "/decided" in self.chrome.current_url, "the decision was not taken", WAIT_S)
        until(lambda: bool(self.chrome.find_elements("css selector", "[data-outcome]")), "there is no outcome", WAIT_S)
        return self.text()

    def screens(self, name: str) -> None:
        """Keep what is seen, at two widths and in both themes."""
        for theme in ("light", "dark"):
            for width in (1280, 380):
                self.screen.shot(SCREENS / f"{name}-{width}-{theme}.png", width, 900, theme)
        self.screen.show(1280, 1000, "light")


@pytest.fixture
def run(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Driven:
    prepared_database(database)
    return Driven(database, command_line_in(tmp_path, database, "orders.py", FILE, monkeypatch, capsys))


@pytest.fixture
def person(run: Driven, tmp_path: Path) -> Generator[Person]:
    """The page in a child process, and a browser with an operator's session."""
    with browsing(tmp_path / "browser") as screen:
        screen.show(1280, 1000, "light")
        yield Person(screen)
        screen.require_clean()


def committed(run: Driven, *lines: str) -> None:
    run.put(*lines)
    run.until_rows("select to_regclass('numbers') is not null", (True,))
    run.until_numbers(*sorted(map(int, lines)))


def test_a_running_driver_is_paused_and_resumed_by_two_clicks_each(run: Driven, person: Person) -> None:
    with run.driver() as child:
        committed(run, "1")
        assert "running" in person.look("pause")
        assert "has heard" in (said := person.confirm("the lake is moved")) or "is paused" in said
        run.until_rows("select doing from stormproof.heartbeat", ("paused",))
        person.look("resume")
        person.confirm("it is there")
        run.put("2")
        run.until_numbers(1, 2)
        child.kill()
        child.wait(WAIT_S)
        assert "nothing is drained" in person.look("drain")
        assert "nothing to stop" in person.look("stop")
    assert run.rows('select action, "by", why from stormproof.audit_actions order by at') == [
        ("pause", "ada", "the lake is moved"),
        ("resume", "ada", "it is there"),
    ]


def test_dead_letters_are_decided_about_while_the_driver_is_dead(run: Driven, person: Person) -> None:
    Path("broken").touch()
    with run.driver() as child:
        run.put("1", "2", "3", "poison")
        run.until_dead(4)
        assert "4 dead letters" in person.look("requeue", error_class="ValueError")
        child.kill()
        child.wait(WAIT_S)
    Path("broken").unlink()
    assert "4 dead letters requeued by ada" in person.confirm("repaired")
    person.chrome.back()
    until(lambda: "4 dead letters requeued by ada" in person.text(), "going back does not show the result", WAIT_S)
    with run.driver():
        run.until_rows("select to_regclass('numbers') is not null", (True,))
        run.until_numbers(1, 2, 3)
        run.until_dead(1)
        message = run.rows("select message from stormproof.audit_dead_letters where state = 'undecided'")[0][0]
        person.look("edit", id=message)
        assert "is handed out again" in person.confirm("a typo", payload="4")
        run.until_numbers(1, 2, 3, 4)
    assert run.rows("select count(*)::int from stormproof.audit_actions") == [(5,)]
    assert run.command("audit", "verify", NAME)["violations"] == []


def test_a_canary_is_followed_on_the_page_until_it_stops(run: Driven, person: Person) -> None:
    Path("broken").touch()
    with run.driver():
        run.put("poison", "1", "2", "3", "4")
        run.until_dead(5)
        Path("broken").unlink()
        person.look("requeue", all="1")
        person.chrome.execute_script("document.querySelector('details[data-hold]').open = true")
        person.screens("decide-requeue")
        person.confirm("repaired?", canary="1", wait_s="60")
        person_sees = "the canary stopped"
        until(lambda: person_sees in person.text(), "the page does not say that the canary stopped", WAIT_S)
        until(lambda: not person.chrome.find_element("id", "live").is_displayed(), "it is said to be live", WAIT_S)
        assert "1 of 1 message of wave 1 failed" in person.text()
        person.screens("decided-canary")
        run.until_dead(5)


def test_a_blocked_batch_goes_on_without_the_rows_that_are_given_up(
    run: Driven, person: Person, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STORMPROOF_REJECTS_MAX_SHARE", "0")
    with run.driver() as child:
        committed(run, "0")
        run.rows("alter table numbers add constraint small check (n < 5)")
        run.put("1", "7")
        run.until_rows("select count(*)::int from stormproof.txn where state = 'blocked'", (1,))
        child.kill()
        child.wait(WAIT_S)
    (txid,) = run.rows("select txid from stormproof.txn where state = 'blocked'")[0]
    (sink,) = run.rows(f"select sink from stormproof.txn_sink where txid = {txid}")[0]
    assert "small" in person.look("retry", txid=txid)
    person.screen.go(f"batch?topology={NAME}&txid={txid}")
    assert "blocked" in person.text()
    batch = person.chrome.current_window_handle
    person.chrome.switch_to.new_window("tab")
    assert "rows of the batch" in person.look("skip-rows", txid=txid, sink=sink)
    person.screens("decide-skip-rows")
    assert "1 row that its table refuses is a reject" in person.confirm("7 is too much")
    with run.driver():
        run.until_rows("select count(*)::int from stormproof.reject", (1,))
        run.until_numbers(0, 1)
        person.chrome.switch_to.window(batch)  # which was never loaded again
        until(lambda: "committed" in person.text(), "the batch's page does not follow it", WAIT_S)
        assert "blocked" not in person.chrome.find_element("css selector", ".headline").text
        assert "What each sink holds of it" in person.text()
    assert run.command("audit", "verify", NAME)["violations"] == []
