"""The page's views in a real browser: nothing leaves the host, nothing is complained of, nothing is too wide."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from urllib.parse import quote

import pytest
from support.brokers import until
from support.browser import SCREENS, WAIT_S, Screen, browsing, needs_browser
from support.command_line import CommandLine
from support.shown import NAME, PAYLOAD, shown_in, sql

from stormproof.core.postgres.database import Database
from stormproof.trident.web.app import VIEWS
from stormproof.trident.web.people import WebRole

pytestmark = [pytest.mark.postgres, needs_browser]


@pytest.fixture
def command(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> CommandLine:
    return shown_in(tmp_path, database, monkeypatch, capsys)


@pytest.fixture
def screen(command: CommandLine, tmp_path: Path) -> Generator[Screen]:
    """The page of that ledger, in a browser with an operator's session."""
    with browsing(tmp_path / "browser") as found:
        yield found


def test_every_view_stands_at_two_widths_and_in_both_themes(screen: Screen, command: CommandLine) -> None:
    letter, *_ = command("dead-letters", "list", NAME)["dead_letters"]
    of = f"topology={NAME}"
    queries = {
        "topology": of,
        "batches": of,
        "batch": f"{of}&txid=1",
        "message": f"{of}&id={quote(letter['id'])}",
        "failure": f"{of}&id={quote(letter['id'])}",
        "find": "q=nothing",
        "replays": "span=1h",
        "question": "name=behind",
    }
    SCREENS.mkdir(parents=True, exist_ok=True)
    wide: list[object] = []
    for route in VIEWS:
        if route.method != "GET" or route.role is not WebRole.READER:
            continue
        screen.go(f"{route.path}?{queries.get(route.name, '')}")
        for width in (1280, 380):
            for theme in ("light", "dark"):
                screen.show(width, 900, theme)
                height = min(int(screen.run("return document.documentElement.scrollHeight")), 4_000)
                found = screen.run("return document.documentElement.scrollWidth")
                if found > width:
                    wide.append((route.name, width, found))
                screen.show(width, height, theme)
                screen.chrome.save_screenshot(str(SCREENS / f"{route.name}-{width}-{theme}.png"))
        assert screen.chrome.find_elements("css selector", "main h1"), route.name
        assert PAYLOAD not in screen.text("main"), route.name
        screen.note()
    assert wide == []
    screen.require_clean()
    assert len(screen.asked) > len(VIEWS)


def test_the_page_pauses_while_rows_are_chosen_and_is_used_by_keys(screen: Screen) -> None:
    screen.go(f"/failures?topology={NAME}&state=undecided")
    until(lambda: screen.text("[data-live]") == "live", "it is not live", WAIT_S)
    screen.chrome.find_element("css selector", "[data-choose]").click()
    assert screen.text("[data-live]") == "paused: rows are chosen"
    assert screen.text("[data-chosen]") == "1"
    screen.run("window.stays = document.querySelector('[data-live-part]'); document.body.focus()")
    screen.chrome.find_element("css selector", "[data-choose]").click()
    until(lambda: not screen.run("return document.contains(window.stays)"), "it did not look again", WAIT_S)
    screen.go("/")
    screen.press("\ue004")  # Tab
    assert screen.run("return document.activeElement.className") == "skip"
    screen.press("/")
    assert screen.run("return document.activeElement.name") == "q"


def test_a_chosen_theme_is_kept(screen: Screen) -> None:
    screen.show(1280, 900, "light")
    ground = "return getComputedStyle(document.body).backgroundColor"
    light = screen.run(ground)
    button = "[data-theme-choice]"
    for word in ("Light", "Dark"):
        screen.chrome.find_element("css selector", button).click()
        assert screen.text(button) == word
    dark = screen.run(ground)
    screen.go("/batches")
    assert (screen.text(button), screen.run(ground)) == ("Dark", dark)
    assert light != dark


def test_a_ledger_that_goes_away_is_said_while_the_page_stays(screen: Screen, database: Database) -> None:
    screen.go("/")
    sql(database, "alter table stormproof.topology rename to away")
    until(lambda: screen.text("[data-trouble]") != "", "nothing is said", WAIT_S)
    assert "the page goes on asking" in screen.text("[data-trouble]")
    assert NAME in screen.text("main")
    sql(database, "alter table stormproof.away rename to topology")
    until(lambda: screen.text("[data-trouble]") == "", "it is still said", WAIT_S)
