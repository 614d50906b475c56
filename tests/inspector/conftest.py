"""Fixtures of the tests that use a browser."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

from tests.engine.mixes import PATIENCE
from tests.inspector.browsing import CHROMIUM, OFFLINE, Pages


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=OFFLINE)
        yield browser
        browser.close()


@pytest.fixture
def pages(browser: Browser) -> Iterator[Pages]:
    pages = Pages(browser)
    yield pages
    pages.close()
    assert pages.said == []


@pytest.fixture
def wait() -> None:
    expect.set_options(timeout=1e3 * PATIENCE)
