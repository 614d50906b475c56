"""The same messages, seed and options get the same answer through every API, and what each API tells of memory is what
the record of the request says."""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import httpx
import pytest

from kvcellar import Engine
from kvcellar.serve import Server, ServeSettings, key_digest
from tests.engine.chatting import chat_engine
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import PATIENCE

ADMIN = "an-admin-key-of-the-server"
MESSAGES = [
    {"role": "system", "content": "You answer questions about hills, rivers and roads."},
    {"role": "user", "content": "Which river is the longest of all, and who has measured it?"},
    {"role": "assistant", "content": "Two rivers are about as long, and many have measured them."},
    {"role": "user", "content": "Name both."},
]
SEED, TOKENS, TOP_P, TOP_K = 7, 16, 0.95, 40
SAMPLING = {"seed": SEED, "temperature": 0.8, "top_p": TOP_P, "top_k": TOP_K}


@dataclass(frozen=True)
class Told:
    """What a response says."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


# A generation config, and what a request without a temperature gets then.
DEFAULTS: tuple[tuple[dict[str, Any], dict[str, float]], ...] = (
    ({}, {"temperature": 1.0}),
    ({"temperature": 0.5, "top_k": 5}, {"temperature": 0.5, "top_k": 5}),
    ({"do_sample": False, "temperature": 0.5}, {"temperature": 0.0}),
)


def data_of(stream: str) -> list[dict[str, Any]]:
    lines = [line.removeprefix("data: ") for line in stream.split("\n") if line.startswith("data: {")]
    return [json.loads(line) for line in lines]


def openai_usage(text: str, usage: Mapping[str, Any]) -> Told:
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return Told(text, usage["prompt_tokens"], cached, usage["completion_tokens"])


def of_chat(response: httpx.Response, stream: bool) -> Told:
    if not stream:
        body = response.json()
        return openai_usage(body["choices"][0]["message"]["content"], body["usage"])
    chunks = data_of(response.text)
    text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])
    return openai_usage(text, chunks[-1]["usage"])


def of_response(response: httpx.Response, stream: bool) -> Told:
    body = data_of(response.text)[-1]["response"] if stream else response.json()
    usage = body["usage"]
    text = "".join(part["text"] for item in body["output"] for part in item["content"])
    cached = usage["input_tokens_details"]["cached_tokens"]
    return Told(text, usage["input_tokens"], cached, usage["output_tokens"])


def of_message(response: httpx.Response, stream: bool) -> Told:
    if stream:
        events = data_of(response.text)
        text = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
        (usage,) = (event["usage"] for event in events if event["type"] == "message_delta")
        (start,) = (event["message"]["usage"] for event in events if event["type"] == "message_start")
        names = "input_tokens", "cache_read_input_tokens"
        assert [start[name] for name in names] == [usage[name] for name in names]
    else:
        body = response.json()
        text, usage = "".join(block["text"] for block in body["content"]), body["usage"]
    read = usage["cache_read_input_tokens"]
    sent = usage["input_tokens"] + read + usage["cache_creation_input_tokens"]
    return Told(text, sent, read, usage["output_tokens"])


def of_ollama(response: httpx.Response, stream: bool) -> Told:
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert stream or len(lines) == 1
    text = "".join(line["message"]["content"] for line in lines)
    last = lines[-1]
    return Told(text, last["prompt_eval_count"], last["prompt_eval_cached_count"], last["eval_count"])


BEGUN = {"role": "assistant", "content": "The longest two are"}
# What asks each API to continue `BEGUN`, which is the last of its messages then.
CONTINUED: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "/v1/chat/completions": {"messages": [*MESSAGES, BEGUN], "continue_final_message": True},
        "/v1/responses": {"input": [*MESSAGES, {**BEGUN, "status": "incomplete"}]},
        "/v1/messages": {"messages": [*MESSAGES[1:], BEGUN]},
        "/api/chat": {"messages": [*MESSAGES, BEGUN]},
    }
)

ROUTES: Mapping[str, tuple[dict[str, Any], Callable[[httpx.Response, bool], Told]]] = MappingProxyType(
    {
        "/v1/chat/completions": ({**SAMPLING, "messages": MESSAGES, "max_completion_tokens": TOKENS}, of_chat),
        "/v1/responses": ({**SAMPLING, "input": MESSAGES, "max_output_tokens": TOKENS, "store": False}, of_response),
        "/v1/messages": (
            {**SAMPLING, "system": MESSAGES[0]["content"], "messages": MESSAGES[1:], "max_tokens": TOKENS},
            of_message,
        ),
        "/api/chat": ({"messages": MESSAGES, "options": {**SAMPLING, "num_predict": TOKENS}}, of_ollama),
    }
)


@pytest.fixture(scope="module", params=["embedded", "llama", "lfm2"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    if request.param == "embedded":
        found = Engine(device="cpu", dtype="float32", cache_bytes=32_000_000, threads=1)
    else:
        found = chat_engine(tmp_path_factory.mktemp(request.param), request.param, dtype="float32")
    with found as engine:
        yield engine


@pytest.fixture(scope="module")
def http(engine: Engine) -> Iterator[httpx.Client]:
    settings = ServeSettings(port=0, admin_digests=(key_digest(ADMIN),))
    with Server(engine, settings) as server, DeclaredClient(base_url=server.url, timeout=PATIENCE) as client:
        yield client


def ask(
    http: httpx.Client, route: str, model: str, stream: bool, more: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Told, dict[str, Any]]:
    """What the response says, and the record of the request."""
    body, read = ROUTES[route]
    options = {"stream_options": {"include_usage": True}} if stream and route.endswith("completions") else {}
    response = http.post(route, json={"model": model, "stream": stream, **options, **body, **more})
    assert response.status_code == 200, response.text
    record = http.get(
        f"/admin/requests/{response.headers['x-request-id']}", headers={"authorization": f"Bearer {ADMIN}"}
    )
    assert record.status_code == 200, record.text
    return read(response, stream), record.json()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", ROUTES)
def test_each_api_answers_as_the_engine_does_and_counts_as_the_record(
    http: httpx.Client, engine: Engine, route: str, stream: bool
) -> None:
    """First without anything in memory, then with the whole prompt in it."""
    engine.clear_cache()
    own = [engine.chat(MESSAGES, max_tokens=TOKENS, **SAMPLING) for _ in range(2)]
    expected = [
        Told(one.text, one.usage.prompt_tokens, one.usage.cached_tokens, one.usage.completion_tokens) for one in own
    ]
    assert expected[0].cached_tokens == 0 < expected[1].cached_tokens
    engine.clear_cache()
    for told in expected:
        found, record = ask(http, route, engine.model.name, stream)
        assert found == told
        names = "prompt_tokens", "cached_tokens", "completion_tokens"
        assert [record[name] for name in names] == [getattr(told, name) for name in names]
        (prompt,) = record["prompts"]
        recall = prompt["recall"]
        assert recall["matched"] + recall["restored"] >= told.cached_tokens, recall
    engine.check()


@pytest.mark.parametrize("stream", [False, True])
def test_each_api_continues_a_message_as_the_engine_does(http: httpx.Client, engine: Engine, stream: bool) -> None:
    prompt = engine.render([*MESSAGES, BEGUN], continue_final_message=True)
    own = engine.generate(prompt, max_tokens=TOKENS, **SAMPLING)
    for route, body in CONTINUED.items():
        told, record = ask(http, route, engine.model.name, stream, body)
        assert (route, told.text) == (route, own.text)
        assert (told.prompt_tokens, told.completion_tokens) == (len(prompt), own.usage.completion_tokens)
        assert record["prompt_tokens"] == len(prompt)


def test_what_one_api_has_computed_the_others_read(http: httpx.Client, engine: Engine) -> None:
    """Chats are rendered to the same tokens, whichever API they come by."""
    for first in ROUTES:
        engine.clear_cache()
        ask(http, first, engine.model.name, False)
        cached = {ask(http, route, engine.model.name, False)[0].cached_tokens for route in ROUTES if route != first}
        assert len(cached) == 1
        assert min(cached) > 0


@pytest.mark.parametrize("engine", ["embedded"], indirect=True)
def test_with_a_key_too_one_api_reads_what_another_has_computed(engine: Engine) -> None:
    """APIs have several numbers of fields for users; where none is given, that makes no difference."""
    settings = ServeSettings(port=0, key_digests=(key_digest("one"), key_digest("two")))
    with Server(engine, settings) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        cached: dict[str, list[int]] = {"one": [], "two": []}
        engine.clear_cache()
        for key, (route, (body, read)) in itertools.product(cached, ROUTES.items()):
            asked = {"model": engine.model.name, "stream": False, **body}
            told = read(http.post(route, json=asked, headers={"authorization": f"Bearer {key}"}), False)
            cached[key].append(told.cached_tokens)
    for first, *others in cached.values():
        assert first == 0 < min(others)


@pytest.mark.parametrize("engine", ["embedded"], indirect=True)
def test_the_tokens_that_are_counted_are_those_that_the_message_counts(engine: Engine) -> None:
    """With a key and a user, too: their replies have the tokens that they were generated with, in other numbers than
    the tokenizer gives their text. What is longer than the context is refused by both."""
    settings = ServeSettings(port=0, key_digests=(key_digest("one"), key_digest("two")))
    path, model = "/v1/messages", {"model": engine.model.name}
    with Server(engine, settings) as server, httpx.Client(base_url=server.url, timeout=PATIENCE) as http:
        differ = 0
        for key, seed in itertools.product(("one", "two"), range(16)):  # two gateways do not know all replies
            headers, messages = {"x-api-key": key}, [{"role": "user", "content": f"Name {seed} hills."}]
            common = {**model, "metadata": {"user_id": f"u{seed}"}}
            how = {"max_tokens": 24, "temperature": 1.5, "seed": seed}
            said = http.post(path, json={**common, **how, "messages": messages}, headers=headers).json()
            messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": "And?"}]
            body = {**common, "messages": messages}
            counted = http.post(f"{path}/count_tokens", json=body, headers=headers).json()["input_tokens"]
            other = http.post(f"{path}/count_tokens", json={**model, "messages": messages}, headers=headers).json()
            told = of_message(http.post(path, json={**body, "max_tokens": 1}, headers=headers), False)
            assert counted == told.prompt_tokens
            differ += other["input_tokens"] != counted
        assert differ > 0, "no reply was generated in other tokens than its text has"
        long = {**model, "messages": [{"role": "user", "content": "a b " * 2 * engine.model.context}]}
        answers = [
            http.post(to, json={**long, **more}, headers={"x-api-key": "one"})
            for to, more in ((path, {"max_tokens": 1}), (f"{path}/count_tokens", {}))
        ]
        assert [one.status_code for one in answers] == [400, 400]
        texts = [one.json()["error"]["message"] for one in answers]
        assert texts[0] == texts[1]


@pytest.mark.parametrize(("files", "used"), DEFAULTS, ids=str)
def test_every_api_and_python_sample_by_default_as_the_files_of_the_model_say(
    files: dict[str, Any], used: dict[str, float], tmp_path: Path
) -> None:
    chat_engine(tmp_path, "llama", record="off").close()
    (tmp_path / "generation_config.json").write_text(json.dumps(files))
    with (
        Engine(tmp_path, threads=1, cache_bytes=8_000_000, record="off") as engine,
        Server(engine, ServeSettings(port=0)) as server,
        DeclaredClient(base_url=server.url, timeout=PATIENCE) as client,
    ):
        own = engine.chat(MESSAGES, seed=SEED, max_tokens=TOKENS)
        assert own.token_ids == engine.chat(MESSAGES, seed=SEED, max_tokens=TOKENS, **used).token_ids
        for route, (body, read) in ROUTES.items():
            options = {name: value for name, value in body.get("options", body).items() if name not in SAMPLING}
            options["seed"] = SEED
            whole = {**body, "options": options} if "options" in body else options
            response = client.post(route, json={"model": engine.model.name, "stream": False, **whole})
            assert read(response, False).text == own.text, route
            if route == "/v1/responses":
                assert response.json()["temperature"] == used["temperature"]
                assert client.post(route, json={**whole, "temperature": 0.7}).json()["temperature"] == 0.7
