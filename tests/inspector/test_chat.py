"""The page to chat in, in the distribution's Chromium: what it marks on texts, its branches, and who may use it.
Skipped without a Chromium."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from playwright.sync_api import Page, Route, expect

from kvcellar import Engine
from kvcellar.inspector.routes import inspector
from kvcellar.serve import Server, ServeSettings
from kvcellar.serve.settings import key_digest
from tests.inspector.browsing import NEEDS_CHROMIUM, Pages

pytestmark = [NEEDS_CHROMIUM, pytest.mark.usefixtures("wait")]
AXE = files("axe_playwright_python").joinpath("axe.min.js")
HOSTILE = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
GIVE = """([name, bytes]) => {
  const given = new DataTransfer(), how = { bubbles: true, cancelable: true };
  given.items.add(new File([new Uint8Array(bytes)], "white.png", { type: "image/png" }));
  const kinds = { drop: DragEvent, paste: ClipboardEvent };
  const event = new kinds[name](name, { ...how, dataTransfer: given, clipboardData: given });
  document.getElementById("text").dispatchEvent(event);
}"""
FIRST, SECOND = "def add(one, other):", "def subtract(one, other):"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(device="cpu", cache_bytes=24_000_000, max_sequences=4, threads=1) as engine:
        yield engine


@contextmanager
def chatting(engine: Engine, pages: Pages, *, allowed: str = "$^", width: int = 1360, **how: Any) -> Iterator[Page]:
    """A page of a server with an empty memory. `how`: its settings, and `color_scheme`."""
    engine.clear_cache()
    scheme = how.pop("color_scheme", "light")
    with Server(engine, ServeSettings(**{"port": 0} | how), mount=inspector) as server:
        page = pages.open(server.url, path="/", allowed=allowed, color_scheme=scheme, width=width)
        yield page
        pages.close()


def set_field(page: Page, **fields: str) -> None:
    for name, value in fields.items():
        page.get_by_label(name, exact=True).fill(value)


def say(page: Page, text: str) -> None:
    """Send a message and wait for the end of its answer."""
    answers = page.locator(".message.assistant")
    before = answers.count()
    page.get_by_label("Your message").fill(text)
    page.keyboard.press("Enter")
    expect(answers).to_have_count(before + 1)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def restored(page: Page) -> tuple[int, int]:
    """What the last answer says: tokens of its prompt from memory, and all of them."""
    told = page.locator(".turn b.memory").last
    expect(told).to_be_visible()
    found = re.match(r"(\d+) of (\d+) prompt tokens? came from memory", told.inner_text())
    assert found is not None, told.inner_text()
    return int(found[1]), int(found[2])


def violations(page: Page) -> list[Any]:
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")
    assert len(found["passes"]) > 15
    return [(one["id"], [node["html"] for node in one["nodes"]]) for one in found["violations"]]


def test_the_second_prompt_came_from_memory_and_is_marked_token_by_token(engine, pages):
    with chatting(engine, pages) as page:
        set_field(page, max_tokens="8", temperature="0")
        say(page, FIRST)
        assert restored(page)[0] == 0
        expect(page.locator(".message.user .t.computed")).not_to_have_count(0)
        say(page, SECOND)
        memory, prompt = restored(page)
        assert 0 < memory < prompt
        you, answer, last, _ = page.locator(".message").all()
        expect(you.locator(".t.computed")).to_have_count(0)
        assert "".join(you.locator(".t.device").all_inner_texts()) == FIRST
        expect(you.locator(".told")).to_contain_text("from memory (device)")
        expect(answer.locator(".t.device")).not_to_have_count(0)
        assert "".join(last.locator(".t.computed").all_inner_texts()) == SECOND
        expect(page.locator(".t.written[title*=' ms'], .t.written[title*=' s']")).not_to_have_count(0)
        page.reload()  # what was said is kept, and its tokens are asked for again
        expect(page.locator(".message.user").first.locator(".t.device")).not_to_have_count(0)
        with page.context.expect_page() as opened:
            page.get_by_role("link", name="in the tree").last.click()
        other = opened.value
        expect(other.locator(".story b.memory")).to_contain_text(str(memory))
        expect(other.locator("g.node.on-way").first).to_be_visible()
        other.close()


def test_an_edit_says_what_stays_before_it_makes_a_branch(engine, pages):
    with chatting(engine, pages) as page:
        set_field(page, max_tokens="6", temperature="0")
        say(page, FIRST + "  # " + "one more " * 8)
        page.get_by_role("button", name="Edit").click()
        page.locator("#edit").fill(FIRST + "  # " + "one more " * 4 + "two")
        expect(page.locator(".stays b.memory")).to_contain_text("stay")
        found = re.match(r"(\d+) of (\d+) prompt tokens stay", page.locator(".stays").inner_text())
        assert found is not None
        page.locator("#edit").press("Enter")
        expect(page.get_by_role("group", name="branches")).to_contain_text("2 of 2")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        memory, prompt = restored(page)
        assert int(found[2]) == prompt
        assert 0 < memory <= int(found[1]) < prompt  # layers with a window or a state may resume further back
        page.get_by_role("button", name="branch before").click()
        expect(page.locator(".message.user")).to_contain_text("one more " * 8)


def test_an_answer_that_is_written_again_stands_beside_the_first(engine, pages):
    with chatting(engine, pages) as page:
        set_field(page, max_tokens="6")
        say(page, FIRST)
        page.get_by_role("button", name="Regenerate").click()
        expect(page.get_by_role("group", name="branches")).to_contain_text("2 of 2")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        memory, prompt = restored(page)
        assert memory == prompt - 1
        page.get_by_role("button", name="Side by side").click()
        expect(page.locator(".beside > li")).to_have_count(2)
        page.get_by_role("button", name="Go on from here").click()
        expect(page.locator(".beside > li").first).to_have_class("chosen")
        assert violations(page) == []


def test_on_a_phone_branches_stand_beside_each_other_and_the_page_does_not_scroll_sideways(engine, pages):
    with chatting(engine, pages, width=360) as page:
        page.get_by_role("button", name="Menu").click()
        set_field(page, max_tokens="24")
        page.get_by_role("button", name="Menu").click()
        say(page, FIRST)
        page.get_by_role("button", name="Regenerate").click()
        expect(page.get_by_role("group", name="branches")).to_contain_text("2 of 2")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        page.get_by_role("button", name="Side by side").click()
        expect(page.locator(".beside > li")).to_have_count(2)
        first, second = (one.bounding_box() for one in page.locator(".beside > li").all())
        assert first is not None
        assert second is not None
        assert first["y"] == second["y"]
        assert first["x"] + first["width"] <= second["x"] < 360
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        page.get_by_role("button", name="Go on from here").focus()
        assert violations(page) == []


def test_a_stop_keeps_what_was_written(engine, pages):
    with chatting(engine, pages) as page:
        set_field(page, max_tokens="3000", temperature="0")
        page.get_by_label("Your message").fill(FIRST)
        page.keyboard.press("Enter")
        text = page.locator(".message.assistant .text")
        expect(text).to_contain_text(re.compile(r"\w"))
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Send")).to_be_visible()
        expect(page.locator(".turn")).to_contain_text("Stopped")
        kept = text.inner_text().strip()
        assert kept
        page.reload()
        expect(text).to_contain_text(kept[:20])
        set_field(page, max_tokens="4")
        say(page, SECOND)
        assert restored(page)[0] > 0


def test_html_in_a_message_is_text(engine, pages):
    with chatting(engine, pages) as page:
        set_field(page, max_tokens="2")
        page.get_by_label("System prompt").fill(HOSTILE)
        say(page, HOSTILE)
        expect(page.locator(".message.user .text")).to_have_text(HOSTILE)
        expect(page.locator(".chats .name")).to_contain_text("<img src=x onerror=")
        assert page.title() == "kvcellar chat"
        assert page.locator("main img, main script").count() == 0


def test_with_keys_the_page_asks_for_one(engine, pages):
    keys = {"key_digests": (key_digest("sk-of-mine"),)}
    with chatting(engine, pages, allowed="status of (401|404)", **keys) as page:
        page.get_by_label("API key").fill("sk-of-a-stranger")
        page.get_by_role("button", name="Chat").click()
        expect(page.locator("form")).to_contain_text("a valid API key is needed")
        assert violations(page) == []
        page.get_by_label("API key").fill("sk-of-mine")
        page.get_by_role("button", name="Chat").click()
        set_field(page, max_tokens="2")
        say(page, FIRST)
        assert restored(page)[1] > 0
        assert page.get_by_role("link", name="in the tree").count() == 0  # the inspector is off


@pytest.mark.parametrize(("scheme", "width"), [("light", 1360), ("dark", 360)])
def test_the_page_is_used_by_keyboard_at_any_width_and_passes_an_accessibility_check(engine, pages, scheme, width):
    with chatting(engine, pages, color_scheme=scheme, width=width) as page:
        expect(page.get_by_label("Your message")).to_be_focused()
        if width < 800:
            page.get_by_role("button", name="Menu").press("Enter")
            set_field(page, max_tokens="4")
            assert violations(page) == []
            page.get_by_role("button", name="Menu").press("Enter")
        else:
            set_field(page, max_tokens="4")
        say(page, FIRST)
        page.keyboard.press("Shift+Tab")
        names = [page.evaluate("document.activeElement.textContent")]
        while names[-1] != "Edit":
            page.keyboard.press("Shift+Tab")
            names.append(page.evaluate("document.activeElement.textContent"))
            assert len(names) < 12, names
        assert {"Regenerate", "Copy", "in the tree"} <= set(names)
        page.keyboard.press("Enter")
        expect(page.locator("#edit")).to_be_focused()
        assert violations(page) == []
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Edit")).to_be_focused()
        assert violations(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_conversations_are_named_kept_and_deleted(engine, pages):
    with chatting(engine, pages) as page:
        set_field(page, max_tokens="2")
        say(page, FIRST)
        page.get_by_role("button", name=f"rename {FIRST}").click()
        page.get_by_label("Name").fill("sums")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="New chat", exact=True).first.click()
        expect(page.locator(".message")).to_have_count(0)
        say(page, SECOND)
        page.reload()
        expect(page.locator(".chats .name")).to_have_text([SECOND, "sums"])
        page.get_by_role("button", name="sums").click()
        expect(page.locator(".message.user")).to_contain_text(FIRST)
        page.get_by_role("button", name="delete sums").click()
        page.get_by_role("button", name="really delete sums").click()
        expect(page.locator(".chats .name")).to_have_text([SECOND])


def without_template(route: Route) -> None:
    answer = route.fetch()
    route.fulfill(response=answer, json=answer.json() | {"chat_template": None})


def test_a_model_without_a_template_continues_texts(engine, pages):
    with chatting(engine, pages) as page:
        page.route("**/tokenizer_info*", without_template)
        page.reload()
        set_field(page, max_tokens="4", temperature="0")
        page.get_by_label("A text to continue").fill(FIRST)
        page.keyboard.press("Enter")
        assert restored(page)[0] == 0
        page.get_by_label("A text to continue").fill("\n    return one")
        page.keyboard.press("Enter")
        expect(page.locator(".turn")).to_have_count(2)
        assert restored(page)[0] > 0
        expect(page.locator(".message.user").first.locator(".t.device")).not_to_have_count(0)


@pytest.mark.slow
def test_an_image_is_sent_once_computed_and_then_remembered(pages, tmp_path: Path):
    Image.new("RGB", (120, 80), "white").save(tmp_path / "white.png")
    with Engine("embedded-vision", cache_bytes=16_000_000, max_sequences=4, threads=1) as engine:
        with chatting(engine, pages) as page:
            set_field(page, max_tokens="4", temperature="0")
            page.get_by_label("Add images").set_input_files(tmp_path / "white.png")
            expect(page.get_by_role("img", name="image 1 to send")).to_be_visible()
            say(page, "What is this?")
            say(page, "How many?")
            assert restored(page)[0] > 30
            for n, event in enumerate(("drop", "paste"), start=1):
                page.evaluate(GIVE, [event, list((tmp_path / "white.png").read_bytes())])
                expect(page.get_by_role("img", name=f"image {n} to send")).to_be_visible()
            page.get_by_role("button", name="remove image 1").click()
            expect(page.get_by_role("list", name="images to send").get_by_role("img")).to_have_count(1)
            first = page.locator(".message.user").first
            expect(first.locator(".told")).to_have_text(re.compile(r"\d+ tokens, 36 of images: \d+ from memory"))
            expect(first.locator(".of-device img")).to_be_visible()
