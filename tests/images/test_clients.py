"""Packages of clients send images, by each API, whole and as streams: the text is that of the engine."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest

from kvcellar import Engine
from kvcellar.frontend.capabilities import read
from kvcellar.serve import Server, ServeSettings

from .files import picture, written
from .test_whole import as_url, user
from .whole import ROWS, write_model

FILE = written(picture(seed=1), "PNG")
DATA = base64.b64encode(FILE).decode()
QUESTION, MOST = "what is it?", 6
MESSAGE: list[Any] = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": as_url(picture(seed=1))}},
            {"type": "text", "text": QUESTION},
        ],
    }
]
BLOCKS: list[Any] = [
    {
        "role": "user",
        "content": [
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": DATA}},
            {"type": "text", "text": QUESTION},
        ],
    }
]
ITEMS: list[Any] = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": as_url(picture(seed=1)), "detail": "auto"},
            {"type": "input_text", "text": QUESTION},
        ],
    }
]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    write_model(folder := tmp_path_factory.mktemp("model"))
    with Engine(folder, cache_bytes=60_000_000, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def url(engine: Engine) -> Iterator[str]:
    with Server(engine, ServeSettings(port=0)) as server:
        yield server.url


@pytest.fixture(scope="module")
def text(engine: Engine) -> str:
    return engine.chat(user(picture(seed=1), QUESTION), max_tokens=MOST, temperature=0.0).text


@pytest.fixture(scope="module")
def model(engine: Engine) -> str:
    return engine.model.name


def test_openai_sends_images_in_chats(url: str, model: str, text: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        asked: Any = {"model": model, "messages": MESSAGE, "max_tokens": MOST, "temperature": 0.0}
        whole = client.chat.completions.create(**asked)
        assert (whole.choices[0].message.content or "") == text
        assert whole.usage is not None
        assert whole.usage.prompt_tokens > ROWS
        parts = client.chat.completions.create(**asked, stream=True)
        assert "".join(part.choices[0].delta.content or "" for part in parts if part.choices) == text


def test_openai_sends_images_to_responses_and_goes_on(url: str, model: str, text: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        asked: Any = {"model": model, "max_output_tokens": 16, "temperature": 0.0}
        first = client.responses.create(input=ITEMS, **asked)
        assert first.output_text.startswith(text)
        assert first.usage is not None
        second = client.responses.create(input="and now?", previous_response_id=first.id, **asked)
        assert second.usage is not None
        assert second.usage.input_tokens_details.cached_tokens > ROWS
        events = [event.type for event in client.responses.create(input=ITEMS, stream=True, **asked)]
        assert events[-1] in ("response.completed", "response.incomplete")


def test_anthropic_sends_images_and_counts_them(url: str, model: str, text: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="any", max_retries=0) as client:
        asked: Any = {"model": model, "messages": BLOCKS, "max_tokens": MOST, "extra_body": {"temperature": 0.0}}
        whole = client.messages.create(**asked)
        assert "".join(part.text for part in whole.content if part.type == "text") == text
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == text
        counted = client.messages.count_tokens(model=model, messages=BLOCKS).input_tokens
        usage = whole.usage
        assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0) > ROWS


def test_ollama_sends_images(url: str, model: str, text: str, tmp_path: Path) -> None:
    """As bytes, base64, and a path, which its package reads."""
    (tmp_path / "a.png").write_bytes(FILE)
    client, options = ollama.Client(url), {"num_predict": MOST, "temperature": 0.0}
    for image in (FILE, DATA, str(tmp_path / "a.png")):
        messages: list[Any] = [{"role": "user", "content": QUESTION, "images": [image]}]
        assert client.chat(model, messages, options=options).message.content == text
    parts = client.generate(model, QUESTION, images=[FILE], options=options, stream=True)
    assert "".join(part.response or "" for part in parts) == text
    assert "vision" in (client.show(model).capabilities or [])
    client._client.close()


def test_a_model_that_is_not_loaded_says_that_it_sees(tmp_path: Path) -> None:
    write_model(tmp_path)
    assert "vision" in read(tmp_path, None)
    (tmp_path / "processor_config.json").unlink()
    (tmp_path / "preprocessor_config.json").unlink()
    assert "vision" not in read(tmp_path, None)
