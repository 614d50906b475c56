"""Packages of others send images, each in a process and an environment of its own, to a model that takes them."""

from collections.abc import Iterator
from typing import Any

import pytest

from kvcellar import Engine
from kvcellar.serve import Server, ServeSettings
from tests.clients.environment import run
from tests.images.files import picture
from tests.images.test_whole import as_url, user
from tests.images.whole import write_model

QUESTION = "what is it?"


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    write_model(folder := tmp_path_factory.mktemp("model"))
    with Engine(folder, cache_bytes=60_000_000, threads=1) as engine:
        yield engine


def told(engine: Engine, client: str, program: str, tokens: int) -> dict[str, Any]:
    """Of each way, which all have the engine's text and so many tokens of a prompt."""
    own = engine.chat(user(picture(seed=1), QUESTION), max_tokens=tokens, temperature=0.0)
    with Server(engine, ServeSettings(port=0)) as server:
        found = run(client, program, server.url, engine.model.name, as_url(picture(seed=1)), QUESTION)
    for one in found.values():
        assert one == {"text": own.text, "streamed": own.text, "prompt_tokens": own.usage.prompt_tokens}
    return found


def test_litellm_sends_images_by_each_api(engine: Engine) -> None:
    assert set(told(engine, "litellm", "images_with_litellm.py", 8)) == {"openai", "anthropic", "ollama"}


def test_langchain_sends_images_by_both_apis(engine: Engine) -> None:
    """It breaks where `detail` is not there, or an image is a block of its own kind."""
    assert len(told(engine, "langchain-openai", "images_with_langchain.py", 16)) == 4
