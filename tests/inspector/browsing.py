"""Pages in the distribution's Chromium."""

import re
import shutil
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from tests.engine.mixes import PATIENCE

CHROMIUM = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
NEEDS_CHROMIUM = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed: apt-get install chromium")
OFFLINE = ("--no-sandbox", "--disable-background-networking", "--disable-component-update", "--no-first-run")


class Pages:
    """Pages on which the browser may report nothing but what a test allows."""

    def __init__(self, browser: Browser) -> None:
        self._browser, self._pages = browser, list[Page]()
        self.said: list[str] = []

    def open(self, url: str, *, path: str = "/inspector", allowed: str = "$^", width: int = 1360, **how: Any) -> Page:
        page = self._browser.new_page(viewport={"width": width, "height": 1000}, **how)
        self._pages.append(page)
        page.set_default_timeout(1e3 * PATIENCE)
        page.on("console", lambda message: re.search(allowed, message.text) or self.said.append(message.text))
        page.on("pageerror", lambda error: self.said.append(str(error)))
        page.on("dialog", lambda dialog: (self.said.append(dialog.message), dialog.dismiss()))
        page.goto(f"{url}{path}")
        return page

    def close(self) -> None:
        while self._pages:
            self._pages.pop().close()
