"""Thumbnails of the images in the tree: who sees them, and how."""

import base64
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from PIL import Image
from playwright.sync_api import expect

from kvcellar import Engine
from kvcellar.inspector import snapshot
from kvcellar.inspector.routes import inspector
from kvcellar.serve import Server, ServeSettings
from kvcellar.serve.settings import key_digest
from tests.engine.mixes import PATIENCE
from tests.images.files import written
from tests.images.whole import write_model
from tests.inspector.browsing import NEEDS_CHROMIUM, Pages
from tests.serve.declared import DeclaredClient

MINE, YOURS, ADMIN = "sk-key-of-mine", "sk-key-of-yours", "sk-key-of-the-operator"
KEYS: dict[str, Any] = {"key_digests": (key_digest(MINE), key_digest(YOURS)), "admin_digests": (key_digest(ADMIN),)}
RED, BLUE = Image.new("RGB", (200, 100), "red"), Image.new("RGB", (30, 60), "blue")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("model")
    write_model(folder)
    with Engine(folder, cache_bytes=60_000_000, threads=1) as engine:
        yield engine


@contextmanager
def served(engine: Engine, **settings: Any) -> Iterator[str]:
    engine.clear_cache()
    with Server(engine, ServeSettings(port=0, **settings), mount=inspector) as server:
        yield server.url


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def show(http: httpx.Client, *images: Image.Image, key: str = "none") -> None:
    """Send a chat with images and wait for its end."""
    urls = (f"data:image/png;base64,{base64.b64encode(written(one, 'PNG')).decode()}" for one in images)
    parts = [*({"type": "image_url", "image_url": {"url": url}} for url in urls), {"type": "text", "text": "what?"}]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}
    http.post("/v1/chat/completions", json=body, headers=bearer(key)).raise_for_status()


def thumbnails(http: httpx.Client, engine: Engine, key: str = "none") -> list[dict[str, Any]]:
    """Of all entries that the key sees."""
    names = [one.name for one in engine.cache.picture().entries]
    answers = [http.get("/inspector/api/entry", params={"name": name}, headers=bearer(key)) for name in names]
    return [one for answer in answers if answer.status_code == 200 for one in answer.json()["images"]]


def pixel(found: dict[str, Any]) -> tuple[int, int, str]:
    """Width, height and the main colour of a thumbnail."""
    kind, data = found["thumbnail"].split(",")
    assert kind == "data:image/jpeg;base64"
    image = Image.open(io.BytesIO(base64.b64decode(data)))
    red, _, blue = image.getpixel((5, 5))  # pyright: ignore[reportGeneralTypeIssues]
    return (*image.size, "red" if red > blue else "blue")


def test_an_entry_has_the_thumbnails_of_its_images(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    with served(engine) as url, DeclaredClient(base_url=url, timeout=PATIENCE) as http:
        show(http, RED, BLUE)
        one, other = thumbnails(http, engine)
        assert (one["width"], one["height"], other["width"], other["height"]) == (200, 100, 30, 60)
        assert (pixel(one), pixel(other)) == ((96, 48, "red"), (30, 60, "blue"))
        assert 0 < one["at"] < other["at"]
        monkeypatch.setattr(snapshot, "IMAGES", 1)
        assert thumbnails(http, engine) == [one]
        engine.clear_cache()
        assert thumbnails(http, engine) == []


def test_only_the_key_that_reads_an_entry_sees_its_images(engine: Engine) -> None:
    with served(engine, inspector=True, **KEYS) as url, DeclaredClient(base_url=url, timeout=PATIENCE) as http:
        show(http, RED, key=MINE)
        assert [len(thumbnails(http, engine, key)) for key in (MINE, YOURS, ADMIN)] == [1, 0, 0]


@NEEDS_CHROMIUM
@pytest.mark.usefixtures("wait")
def test_the_page_shows_thumbnails_and_loads_nothing_from_elsewhere(engine: Engine, pages: Pages) -> None:
    with served(engine) as url, httpx.Client(base_url=url, timeout=PATIENCE) as http:
        show(http, RED, BLUE)
        page = pages.open(url)
        asked = list[str]()
        page.on("request", lambda request: asked.append(request.url))
        page.get_by_role("treeitem").first.click()
        image = page.get_by_role("list", name="images of the entry").get_by_role("img")
        expect(image).to_have_count(2)
        expect(image.first).to_be_visible()
        assert image.first.evaluate("one => [one.naturalWidth, one.naturalHeight]") == [96, 48]
        expect(page.locator("figcaption").first).to_contain_text("200 × 100")
        assert all(one.startswith((url, "data:image/jpeg;")) for one in asked)
        pages.close()
