"""A person at the page: looks at a decision, confirms it, and reads what became of it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from starlette.testclient import TestClient

from support.web import Elements, inert_faults, post


def said(text: str) -> str:
    """A page's text, in one line."""
    assert inert_faults(text) == []
    return " ".join(Elements(text).text.split())


@dataclass(frozen=True, slots=True)
class Shown:
    """What the page shows before a confirmation."""

    status: int
    text: str
    proposal: str | None
    count: int | None
    address: str = ""


@dataclass(frozen=True, slots=True)
class Deciding:
    """An operator's browser, for one topology."""

    browser: TestClient
    topology: str

    def look(self, action: str, **params: object) -> Shown:
        """The page that asks for a confirmation."""
        query = {"action": action, "topology": self.topology, **params}
        return self._shown(self.browser.get("/decide", params=query, follow_redirects=True))  # type: ignore[arg-type] # lists are allowed

    def select(self, action: str, *ids: str) -> Shown:
        """The same for messages that were checked in a list."""
        answer = post(self.browser, "/decide/selected", {"action": action, "topology": self.topology, "id": list(ids)})
        return self._shown(self.browser.get(answer.headers["location"]) if answer.is_redirect else answer)

    def confirm(self, shown: Shown, **fields: str) -> str:
        """Confirm, and read the outcome."""
        answer = self.send(shown, **fields)
        assert answer.status_code == 303, (answer.status_code, said(answer.text))
        return said(self.browser.get(answer.headers["location"]).text)

    def send(self, shown: Shown, **fields: str) -> Any:
        """The confirmation's own answer."""
        assert shown.proposal is not None, shown.text
        return post(self.browser, "/decide/confirm", {"proposal": shown.proposal, **fields})

    def do(self, action: str, why: str = "for a test", **params: object) -> str:
        """Look, confirm, read."""
        return self.confirm(self.look(action, **params), why=why)

    def _shown(self, answer: Any) -> Shown:
        proposal = re.search(r'name="proposal" value="([^"]+)"', answer.text)
        count = re.search(r"data-count>([\d,]+)<", answer.text)
        return Shown(
            answer.status_code,
            said(answer.text),
            None if proposal is None else proposal[1],
            None if count is None else int(count[1].replace(",", "")),
            str(answer.url),
        )
