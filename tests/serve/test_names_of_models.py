"""A response says the name of the model as the client has sent it, and an unknown name is not found, in every API."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from kvcellar.serve import Server
from tests.library.made import made
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import PATIENCE
from tests.serve.fake_library import World, source_in

USER = {"role": "user", "content": "hello"}
NAMES = ("one", "one:latest", "One", "ONE:latest", "owner/two:small", "fake")
BODIES: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "/v1/completions": {"prompt": "hello"},
        "/v1/chat/completions": {"messages": [USER]},
        "/v1/responses": {"input": "hello"},
        "/v1/messages": {"messages": [USER], "max_tokens": 4},
        "/api/chat": {"messages": [USER]},
        "/api/generate": {"prompt": "hello"},
    }
)
OTHERS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "/v1/embeddings": {"input": "hello"},
        "/api/embed": {"input": "hello"},
        "/api/show": {},
        "/tokenize": {"prompt": "hello"},
        "/v1/messages/count_tokens": {"messages": [USER]},
    }
)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder: Path = tmp_path_factory.mktemp("models")
    world, source = World(folder / "library"), source_in(folder)
    for name in ("one", "owner/two:small"):
        made(world.library, name, f"FROM {source}", source.parent)
    with world.serving() as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with DeclaredClient(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def models_in(value: Any) -> Iterator[str]:
    """Every field of this name."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "model":
                yield inner
            yield from models_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from models_in(inner)


def values_of(text: str) -> list[Any]:
    lines = (line.removeprefix("data: ") for line in text.splitlines())
    return [json.loads(line) for line in lines if line.startswith("{")]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("route", BODIES)
def test_the_model_is_named_as_the_client_did(http: httpx.Client, route: str, name: str, stream: bool) -> None:
    response = http.post(route, json={"model": name, "stream": stream, **BODIES[route]})
    assert response.status_code == 200, response.text
    found = [one for value in values_of(response.text) for one in models_in(value)]
    assert found
    assert set(found) == {name}


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
def test_without_a_name_it_is_that_of_the_default(http: httpx.Client, route: str) -> None:
    assert http.post(route, json=BODIES[route]).json()["model"] == "fake"


@pytest.mark.parametrize("name", ["one:latest", "One", "owner/two:small"])
def test_a_load_names_the_model_as_the_client_did(http: httpx.Client, name: str) -> None:
    for body in ({}, {"keep_alive": 0}):
        assert http.post("/api/generate", json={"model": name, **body}).json()["model"] == name


@pytest.mark.parametrize("route", {**BODIES, **OTHERS})
def test_an_unknown_model_is_not_found_in_the_form_of_the_api(http: httpx.Client, route: str) -> None:
    response = http.post(route, json={"model": "no/such:one", **{**BODIES, **OTHERS}[route]})
    error = response.json()["error"]
    message = error if route.startswith("/api/") else error["message"]
    assert response.status_code == 404
    assert message.startswith("model 'no/such:one' not found")
    if route.startswith("/v1/messages"):
        assert (response.json()["type"], error["type"]) == ("error", "not_found_error")
    elif not route.startswith("/api/"):
        assert (error["code"], error["param"], error["type"]) == ("model_not_found", "model", "invalid_request_error")


def test_the_official_clients_raise_their_errors(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="not found") as told:
            client.chat.completions.create(model="none", messages=[{"role": "user", "content": "a"}])
        assert told.value.code == "model_not_found"
        with pytest.raises(openai.NotFoundError, match="not found"):
            client.models.retrieve("none")
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        with pytest.raises(anthropic.NotFoundError, match="not found"):
            client.messages.create(model="none", max_tokens=1, messages=[{"role": "user", "content": "a"}])
    with ollama.Client(host=server.url, trust_env=False) as client:
        for ask in (lambda: client.chat("none", [USER]), lambda: client.show("none"), lambda: client.generate("none")):
            with pytest.raises(ollama.ResponseError, match=r"^model 'none' not found") as refused:
                ask()
            assert refused.value.status_code == 404
