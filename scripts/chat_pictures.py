"""Take pictures of the page to chat in, `docs/chat*.png`: a chat about an image, an answer that is being written, an
edit with what stays in memory, and branches side by side on a phone's width.

    python scripts/chat_pictures.py [DIRECTORY]        # instead of docs

It needs the Chromium of the system.
"""

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

from kvcellar import Engine
from kvcellar.inspector.routes import inspector
from kvcellar.serve import Server, ServeSettings

DOCS = Path(__file__).parent.parent / "docs"
FIRST = "def average(numbers):"
LONG = "def average(numbers, weights=None):\n    # None counts each number once. Raises ValueError where there are none"
EDITED = LONG.replace("ValueError where there are none", "TypeError for texts")


@contextmanager
def _chatting(engine: Engine, browser: Browser, width: int, height: int = 780) -> Iterator[Page]:
    engine.clear_cache()
    with Server(engine, ServeSettings(port=0), mount=inspector) as server:
        page = browser.new_page(viewport={"width": width, "height": height})
        page.goto(server.url)
        expect(page.get_by_label("Your message")).to_be_visible()
        yield page
        page.close()


def _say(page: Page, text: str, **settings: str) -> None:
    """`settings`: fields of the page, which are beside the messages where it is wide enough."""
    for name, value in settings.items():
        page.get_by_label(name, exact=True).fill(value)
    page.get_by_label("Your message").fill(text)
    page.get_by_label("Your message").press("Enter")


def _ended(page: Page, answers: int) -> None:
    expect(page.locator(".turn")).to_have_count(answers)
    expect(page.get_by_role("button", name="Send")).to_be_visible()


def _image(page: Page) -> None:
    page.get_by_label("Add images").set_input_files(DOCS / "squares.png")
    expect(page.get_by_role("img", name="image 1 to send")).to_be_visible()
    _say(page, "What is this?", temperature="0")
    _ended(page, 1)
    _say(page, "What colour are they?")
    _ended(page, 2)


def _writing(page: Page) -> None:
    _say(page, FIRST, temperature="0", max_tokens="24")
    _ended(page, 1)
    slow = {"offline": False, "latency": 0, "downloadThroughput": 16_000, "uploadThroughput": -1}
    page.context.new_cdp_session(page).send("Network.emulateNetworkConditions", slow)
    _say(page, LONG, temperature="0.7", seed="7", max_tokens="3000")
    expect(page.get_by_role("button", name="Stop")).to_be_visible()
    expect(page.locator(".message.assistant .text").last).to_have_text(re.compile(".{200}", re.DOTALL))


def _edit(page: Page) -> None:
    _say(page, LONG, temperature="0", max_tokens="24")
    _ended(page, 1)
    _say(page, FIRST)
    _ended(page, 2)
    page.get_by_role("button", name="Edit").first.click()
    page.locator("#edit").fill(EDITED)
    expect(page.locator(".stays b")).to_be_visible()
    page.evaluate("scrollTo(0, 0)")


def _branches(page: Page) -> None:
    page.get_by_role("button", name="Menu").click()
    page.get_by_label("max_tokens").fill("32")
    page.get_by_role("button", name="Menu").click()
    _say(page, FIRST)
    _ended(page, 1)
    page.get_by_role("button", name="Regenerate").click()
    expect(page.get_by_role("group", name="branches")).to_contain_text("2 of 2")
    _ended(page, 1)
    page.get_by_role("button", name="Side by side").click()
    expect(page.locator(".beside > li")).to_have_count(2)
    page.evaluate("scrollTo(0, 0)")


PICTURES = {  # by name: the model, the width, and what is done before
    "chat": ("embedded-vision", 1120, _image),
    "chat-writing": ("embedded", 1120, _writing),
    "chat-edit": ("embedded", 1120, _edit),
    "chat-branches": ("embedded", 360, _branches),
}


def main(folder: Path) -> None:
    chromium = next((path for name in ("chromium", "chromium-browser") if (path := shutil.which(name))), None)
    if chromium is None:
        sys.exit("no Chromium is installed: apt-get install chromium")
    expect.set_options(timeout=120_000)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for name, (model, width, prepare) in PICTURES.items():
            with (
                Engine(model, device="cpu", cache_bytes=24_000_000, max_sequences=4) as engine,
                _chatting(engine, browser, width) as page,
            ):
                prepare(page)
                page.screenshot(path=folder / f"{name}.png", animations="disabled")
                print(f"wrote {folder / name}.png", flush=True)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else DOCS)
