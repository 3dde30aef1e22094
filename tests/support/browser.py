"""A real browser in front of `stormproof web`: what it shows, what it asks for, and what it complains of."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from support.brokers import until

BROWSER, BROWSERS_DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(not (BROWSER and BROWSERS_DRIVER), reason="needs Chromium and chromedriver")
SCREENS: Final = Path(__file__).parents[2] / "build" / "screens"
WAIT_S: Final = 60.0
FLAGS: Final = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run")
FLAGS_TOO: Final = ("--disable-component-update", "--disable-sync", "--hide-scrollbars")


class Screen:
    """A browser with a session of an operator's, and what it asked for and complained of."""

    def __init__(self, chrome: Any, address: str) -> None:
        self.chrome = chrome
        self.address = address
        self.asked: list[str] = []
        self.complaints: list[str] = []

    def go(self, path: str) -> None:
        self.chrome.get(self.address + path.lstrip("/"))
        self.note()

    def note(self) -> None:
        """Take what the browser logged since."""
        for line in self.chrome.get_log("performance"):
            message = json.loads(line["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                self.asked.append(str(message["params"]["request"]["url"]))
        self.complaints += [str(x["message"]) for x in self.chrome.get_log("browser") if x["level"] == "SEVERE"]

    def show(self, width: int, height: int, theme: str) -> None:
        media = {"features": [{"name": "prefers-color-scheme", "value": theme}]}
        self.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.chrome.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def run(self, script: str) -> Any:
        return self.chrome.execute_script(script)

    def text(self, selector: str) -> str:
        return str(self.chrome.find_element("css selector", selector).text)

    def shot(self, file: Path, width: int, height: int, theme: str) -> None:
        """Keep the page as it looks at this size in this theme; as WebP or as PNG, as the file is called."""
        self.show(width, height, theme)
        form = {"format": "webp", "quality": 60} if file.suffix == ".webp" else {"format": "png"}
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(base64.b64decode(self.chrome.execute_cdp_cmd("Page.captureScreenshot", form)["data"]))

    def require_clean(self) -> None:
        """The browser complained of nothing, and asked for nothing elsewhere."""
        self.note()
        assert self.asked
        assert self.complaints == []
        assert [url for url in self.asked if not url.startswith((self.address, "data:"))] == []

    def press(self, key: str) -> None:
        self.chrome.switch_to.active_element.send_keys(key)


@contextmanager
def browsing(folder: Path) -> Generator[Screen]:
    """`stormproof web` in a process of its own, for the ledger that the environment names, and Chromium with its one-time
    address. The browser's profile is in the folder.
    """
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    assert BROWSER is not None
    options = ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, *FLAGS_TOO, f"--user-data-dir={folder}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    call = [sys.executable, "-m", "stormproof", "web", "--port", "0", "--json"]
    with subprocess.Popen(call, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as server:
        try:
            assert server.stdout is not None
            served = json.loads(server.stdout.readline())
            chrome: Any = Chrome(options=options, service=Service(BROWSERS_DRIVER))
            try:
                chrome.get(served["url"])
                until(lambda: "Overview" in chrome.title, "the session did not begin", WAIT_S)
                chrome.get_log("performance")  # the browser's own first page
                yield Screen(chrome, served["address"])
            finally:
                chrome.quit()
        finally:
            server.terminate()
