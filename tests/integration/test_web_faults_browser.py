"""The page's views in a real browser while a driver stands still, is killed, and a table refuses a batch."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Generator
from pathlib import Path
from typing import Final
from urllib.parse import urlencode

import pytest
from support.brokers import until
from support.browser import SCREENS, WAIT_S, Screen, browsing, needs_browser
from support.command_line import command_line_in
from support.driven import NAME, Driven
from support.page_reader import BLOCK
from support.queues import prepared_database

from stormproof.core.postgres.database import Database
from stormproof.trident.ledger.control import SILENT_S

pytestmark = [pytest.mark.postgres, needs_browser]
DOCS: Final = Path(__file__).parents[2] / "docs"
SHOP: Final = "create table orders (order_id bigint, customer text check (customer <> ''), amount numeric(9,2))"
LOOKS_S: Final = 15.0
"""More than the page waits between two looks at the ledger, on a slow machine."""
DOCUMENTED: Final = SCREENS / "docs"
"""Where the pictures of docs/operating.md are put; `tools/screens_doc.py` takes them from there."""


@pytest.fixture
def orders(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Driven:
    """The topology, the table and the evening's orders of docs/operating.md, committed as that page says."""
    blocks = [(block["language"], block["text"]) for block in BLOCK.finditer((DOCS / "operating.md").read_text())]
    topology = next(text for language, text in blocks if language == "python")
    evening = next(text for language, text in blocks if language == "json")
    text = f"{topology}\n\ndef topology():\n    return orders\n"
    run = Driven(
        prepared_database(database), command_line_in(tmp_path, database, "orders.py", text, monkeypatch, capsys)
    )
    run.rows(SHOP)
    run.put(*evening.splitlines())
    run.command("run", "orders.py:topology", "--engine", "inline", "--until-idle")
    run.command("audit", "verify", NAME, "--by", "ann")
    return run


@pytest.fixture
def screen(orders: Driven, tmp_path: Path) -> Generator[Screen]:
    """The page of that ledger, in a browser with an operator's session."""
    with browsing(tmp_path / "browser") as found:
        yield found


def until_said(screen: Screen, words: str, within_s: float = WAIT_S) -> str:
    """Wait until the view that is open says it by itself; all that it says."""
    said = ""

    def is_said() -> bool:
        nonlocal said
        said = " ".join(screen.text("main").split())
        return words in said

    until(is_said, f"the page does not say {words!r}", within_s)
    return said


def shown(screen: Screen, path: str, *words: str, **query: object) -> str:
    """Go to a view, which must say this; all that it says."""
    screen.go(f"{path}?{urlencode(query)}")
    said = " ".join(screen.text("main").split())
    assert [word for word in words if word not in said] == [], said
    return said


PLACES: Final = """
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) for (const [here, shown] of arguments[0])
  walk.currentNode.nodeValue = walk.currentNode.nodeValue.replaceAll(here, shown);
"""


def kept(screen: Screen, name: str, height: int) -> None:
    """A picture of the view for the docs; where the tests' folder and database are is not in it."""
    url = dict(Database.from_url(os.environ["STORMPROOF_DATABASE_URL"]).parameters)
    places = [(os.getcwd(), "/srv"), (url["host"], "db.example"), (f"/{url['dbname']}?", "/shop?")]
    screen.chrome.execute_script(PLACES, places)
    screen.shot(DOCUMENTED / f"{name}.webp", 1200, height, "light")


def test_views_follow_a_driver_that_stands_still_and_is_killed(orders: Driven, screen: Screen) -> None:
    screen.go("/")
    assert "stopped" in until_said(screen, NAME)
    with orders.driver() as child:
        alive = until_said(screen, "running")
        assert "Need somebody 0" in alive
        os.kill(child.pid, signal.SIGSTOP)
        # No reload: the open page looks again by itself, and says so soon after the driver's last sign is too old.
        silent = until_said(screen, "has given no sign of life for", SILENT_S + LOOKS_S)
        age = re.search(r"no sign of life for (\d+) s", silent)
        assert age is not None
        assert SILENT_S <= int(age[1]) <= SILENT_S + LOOKS_S
        assert "Need somebody 1" in silent
        child.kill()
        child.wait(WAIT_S)
        dead = until_said(screen, "is gone without an orderly end: start the topology again, which recovers", LOOKS_S)
        assert "no sign of life" not in dead
        kept(screen, "overview-dead-driver", 430)
        shown(screen, "/topology", "is gone without an orderly end", topology=NAME)
    with orders.driver():
        screen.go("/")
        assert "Need somebody 0" in until_said(screen, "running")
    screen.require_clean()


def test_views_show_a_blocked_batch_and_its_reason(orders: Driven, screen: Screen) -> None:
    screen.go("/")
    with orders.driver(STORMPROOF_REJECTS_MAX_SHARE="0"):
        until_said(screen, "running")
        orders.rows("alter table orders add constraint no_late check (order_id < 6)")
        orders.put('{"order_id": 6, "customer": "grace", "amount": "2.00"}')
        said = until_said(screen, "is blocked", WAIT_S)
    (txid,) = orders.rows("select txid from stormproof.txn where state = 'blocked'")[0]
    assert f"txid {txid} is blocked" in said
    assert "no_late" not in said, "readers look at the same overview, and the reason may quote a row"
    assert f"stormproof retry {NAME} {txid}" in said
    kept(screen, "overview-blocked", 480)
    shown(screen, "/batches", f"{txid}", "blocked", topology=NAME, state="blocked")
    shown(screen, "/topology", f"txid {txid} is blocked: sink 'shop'", "no_late", topology=NAME)
    kept(screen, "topology", 1000)
    shown(screen, "/batch", "blocked", "no_late", "lake", topology=NAME, txid=txid)
    kept(screen, "batch-blocked", 1000)
    shown(screen, "/question", "shop", f"{txid}", name="behind", topology=NAME)
    shown(screen, "/question", "blocked", "no_late", name="aborted", topology=NAME)
    kept(screen, "question-aborted", 420)
    shown(screen, "/failures", "ValueError", "23514", topology=NAME)
    kept(screen, "failures", 640)
    shown(screen, "/decide", "no_late", action="retry", topology=NAME, txid=txid)
    kept(screen, "decide-retry", 700)
    screen.require_clean()
