"""The page in the distribution's Chromium: it loads, follows, explains, and passes an accessibility check. Skipped
without a Chromium. Screenshots are in the temporary directories of the tests, or in $KVCELLAR_SCREENSHOTS."""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest
from playwright.sync_api import Page, expect

from kvcellar import Engine
from kvcellar.inspector.routes import inspector
from kvcellar.serve import Server, ServeSettings
from kvcellar.serve.settings import key_digest
from tests.cluster.replicas import of_replicas
from tests.engine.mixes import PATIENCE
from tests.inspector.browsing import NEEDS_CHROMIUM, Pages

pytestmark = NEEDS_CHROMIUM
SYSTEM = {"role": "system", "content": "You are a careful assistant of a library. Answer in Python only. " * 3}
FIRST = {"role": "user", "content": "Write a function that adds two numbers."}
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
AXE = files("axe_playwright_python").joinpath("axe.min.js")


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(device="cpu", cache_bytes=24_000_000, max_sequences=4, threads=1) as engine:
        yield engine


@pytest.fixture(autouse=True)
def empty(engine: Engine) -> None:
    engine.clear_cache()


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """Where screenshots are kept."""
    folder = Path(os.environ.get("KVCELLAR_SCREENSHOTS", tmp_path))
    folder.mkdir(exist_ok=True)
    return folder


@contextmanager
def served(engine: Engine, pages: Pages | None = None, **settings: Any) -> Iterator[str]:
    """`pages` are closed before the server: else they would report that it has gone."""
    with Server(engine, ServeSettings(**{"port": 0} | settings), mount=inspector) as server:
        yield server.url
        if pages is not None:
            pages.close()


def chat(url: str, *messages: dict[str, str], key: str = "none") -> str:
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    headers = {"authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=PATIENCE).raise_for_status()
    return answer.json()["choices"][0]["message"]["content"]


def two_turns(url: str) -> None:
    first = chat(url, SYSTEM, FIRST)
    chat(url, SYSTEM, FIRST, {"role": "assistant", "content": first}, {"role": "user", "content": "And three?"})


def newest(page: Page) -> Any:
    return page.locator("tr.past").first


@pytest.mark.usefixtures("wait")
def test_the_page_follows_and_says_why_the_second_turn_was_fast(engine, pages, kept):
    with served(engine, pages) as url:
        page = pages.open(url)
        expect(page.get_by_role("status")).to_contain_text("live")
        before = page.locator("tr.past").count()
        two_turns(url)
        expect(page.locator("tr.past")).to_have_count(min(64, before + 2))
        newest(page).get_by_role("button").click()
        story = page.locator(".story")
        expect(story).to_contain_text("came from memory")
        expect(story).to_contain_text("had to be computed")
        restored = engine.cache.picture().ended[0].recall.restored
        assert restored > 0
        expect(story.locator("b.memory")).to_contain_text(str(restored))
        expect(page.locator(".way li").first).to_contain_text("from memory")
        expect(page.locator("g.node.on-way").first).to_be_visible()
        page.screenshot(path=kept / "second-turn.png", full_page=True)


@pytest.mark.usefixtures("wait")
def test_a_miss_is_shown_with_its_reason_and_both_sides(engine, pages, kept):
    with served(engine, pages) as url:
        for end in ("red", "green"):
            body = {"prompt": f"import os\nimport sys\ncolor = '{end}'", "max_tokens": 2}
            httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).raise_for_status()
        page = pages.open(url)
        newest(page).get_by_role("button").click()
        recall = engine.cache.picture().ended[0].recall
        expect(newest(page).locator(".reason")).to_have_text(recall.reason)
        expect(page.locator("dd .reason")).to_have_text(recall.reason)
        expect(page.locator(".detail").first).to_contain_text(recall.detail)
        page.screenshot(path=kept / "miss.png", full_page=True)


@pytest.mark.usefixtures("wait")
def test_the_tree_is_walked_with_the_keyboard_and_shows_texts(engine, pages, kept):
    with served(engine, pages) as url:
        two_turns(url)
        chat(url, {"role": "user", "content": "Short."})
        page = pages.open(url, color_scheme="dark", reduced_motion="reduce")
        item = page.get_by_role("treeitem")
        expect(item.first).to_be_visible()
        page.locator('[role="treeitem"][tabindex="0"]').focus()
        names = [one.get_attribute("data-name") for one in item.all()]
        focused = page.locator('[role="treeitem"]:focus')
        for key, at in (("End", -1), ("Home", 0), ("ArrowDown", 1)):
            page.keyboard.press(key)
            expect(focused).to_have_attribute("data-name", names[at])
        page.keyboard.press("Enter")
        expect(page.get_by_role("heading", name=f"Entry {names[1]}")).to_be_visible()
        expect(page.locator("pre")).to_be_visible()
        expect(focused).to_have_attribute("data-name", names[1])
        page.screenshot(path=kept / "tree-dark.png", full_page=True)


@pytest.mark.usefixtures("wait")
def test_the_page_survives_a_restart_of_the_server(engine, pages, kept):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with served(engine, port=port) as url:
        two_turns(url)
        page = pages.open(url, allowed="ERR_|Failed to load resource")
        newest(page).get_by_role("button").click()
        expect(page.locator(".story")).to_be_visible()
    expect(page.get_by_role("status")).to_contain_text("connection lost")
    page.screenshot(path=kept / "lost.png")
    with served(engine, pages, port=port) as url:
        expect(page.get_by_role("status")).to_contain_text("live")
        expect(page.locator(".story")).to_have_count(0)  # numbers of requests may be of others now
        newest(page).get_by_role("button").click()
        expect(page.locator(".story")).to_be_visible()


@pytest.mark.usefixtures("wait")
def test_texts_of_strangers_stay_texts(engine, pages):
    with served(engine, pages) as url:
        body = {"prompt": HOSTILE * 2, "max_tokens": 2}
        httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE).raise_for_status()
        page = pages.open(url)
        page.get_by_role("treeitem").first.click()
        expect(page.locator("pre")).to_contain_text("<img src=x onerror=")
        assert page.title() == "kvcellar inspector"
        assert page.locator("main img, main script").count() == 0


@pytest.mark.usefixtures("wait")
def test_with_keys_the_page_asks_for_one_and_shows_what_is_its_own(engine, pages, kept):
    keys = {"key_digests": (key_digest("sk-of-mine"), key_digest("sk-of-yours")), "inspector": True}
    with served(engine, pages, **keys) as url:
        chat(url, SYSTEM, FIRST, key="sk-of-yours")
        page = pages.open(url, allowed="status of 401")
        page.get_by_label("API key").fill("sk-of-a-stranger")
        page.get_by_role("button", name="Look inside").click()
        expect(page.locator("form")).to_contain_text("a valid API key is needed")
        page.screenshot(path=kept / "key.png")
        page.get_by_label("API key").fill("sk-of-mine")
        page.get_by_role("button", name="Look inside").click()
        expect(page.get_by_role("status")).to_contain_text("live")
        expect(page.locator("main")).to_contain_text("Steps compute tokens of all keys: an admin key shows them.")
        assert page.get_by_role("treeitem").count() == 0
        chat(url, {"role": "user", "content": "Mine."}, key="sk-of-mine")
        expect(page.get_by_role("treeitem")).not_to_have_count(0)
        expect(page.locator("tr.past")).to_have_count(1)


@pytest.mark.usefixtures("wait")
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_page_passes_an_accessibility_check(engine, pages, scheme):
    with served(engine, pages) as url:
        two_turns(url)
        page = pages.open(url, color_scheme=scheme)
        newest(page).get_by_role("button").click()
        expect(page.locator(".story")).to_be_visible()
        page.get_by_role("treeitem").first.click()
        expect(page.locator("pre")).to_be_visible()
        page.evaluate(AXE.read_text())
        found = page.evaluate("axe.run()")
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found["violations"]] == []
        assert len(found["passes"]) > 30


@pytest.mark.usefixtures("wait")
def test_replicas_are_shown_side_by_side_and_one_is_chosen(pages, kept):
    settings: Any = {"cache_bytes": 24_000_000, "max_sequences": 4, "threads": 1, "record": "off"}
    with of_replicas(None, settings, 2) as engine, served(engine, pages) as url:
        two_turns(url)
        page = pages.open(url)
        rows = page.get_by_role("region", name="table of replicas").locator("tbody tr")
        expect(rows).to_have_count(2)
        ended = {name: len(engine.cache.picture(name).ended) for name in ("replica-0", "replica-1")}
        for name, count in ended.items():
            page.get_by_role("button", name=name).click()
            expect(page.get_by_role("button", name=name)).to_have_attribute("aria-pressed", "true")
            expect(page.locator("tr.past")).to_have_count(count)
        assert sum(ended.values()) == 2
        page.screenshot(path=kept / "replicas.png", full_page=True)
        page.evaluate(AXE.read_text())
        found = page.evaluate("axe.run()")
        assert [(one["id"], [node["html"] for node in one["nodes"]]) for one in found["violations"]] == []
