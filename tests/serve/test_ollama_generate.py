"""Ollama's routes that generate text: its own client with the server, and what the client does not show."""

import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest

from kvcellar.errors import Overloaded
from kvcellar.serve import Server, ServeSettings
from kvcellar.text.replies.detection import known
from tests.serve.fake_engine import CONTEXT, PATIENCE, FakeEngine, FakeModel
from tests.serve.wire import MODEL

ASKED = [{"role": "user", "content": "hi"}]
SAID = "<user>hi"


@pytest.fixture(scope="module")
def shared_client(server: Server) -> Iterator[ollama.Client]:
    client = ollama.Client(host=server.url, timeout=PATIENCE)
    yield client
    client._client.close()


@pytest.fixture
def client(shared_client: ollama.Client, engine: FakeEngine) -> ollama.Client:
    return shared_client


def test_a_chat(client: ollama.Client, engine: FakeEngine) -> None:
    with engine.scripted(cached=3):
        found = client.chat(MODEL, ASKED, options={"temperature": 0.5, "num_predict": 100, "seed": 7})
    assert (found.message.role, found.message.content, found.model) == ("assistant", SAID, MODEL)
    assert (found.done, found.done_reason) == (True, "stop")
    assert (found.prompt_eval_count, found.eval_count) == (len(SAID), len(SAID))
    assert (found.prompt_eval_duration, found.eval_duration) == (250_000_000, 2_000_000_000)
    assert found.total_duration >= found.load_duration >= 0
    ((_, params),) = engine.seen
    assert (params.temperature, params.max_tokens, params.seed) == (0.5, 100, 7)


def test_tokens_from_memory_are_counted_apart(http: httpx.Client, engine: FakeEngine) -> None:
    body = {"model": MODEL, "messages": ASKED, "stream": False}
    with engine.scripted(cached=3):
        found = http.post("/api/chat", json=body).json()
    assert (found["prompt_eval_count"], found["prompt_eval_cached_count"]) == (len(SAID), 3)


@pytest.mark.parametrize("raw", [False, True])
def test_a_stream_adds_up_to_the_answer(client: ollama.Client, raw: bool) -> None:
    """Its last line has no text, and is the only one that is done."""
    whole = client.generate(MODEL, "hello", raw=raw)
    lines = list(client.generate(MODEL, "hello", raw=raw, stream=True))
    assert "".join(line.response for line in lines) == whole.response == ("hello" if raw else "<user>hello")
    assert [line.done for line in lines] == [False] * (len(lines) - 1) + [True]
    assert (lines[-1].eval_count, lines[-1].done_reason) == (whole.eval_count, whole.done_reason)


def test_streaming_is_the_default(http: httpx.Client) -> None:
    response = http.post("/api/chat", json={"model": MODEL, "messages": ASKED})
    assert response.headers["content-type"] == "application/x-ndjson"
    lines = [json.loads(line) for line in response.text.splitlines()]
    assert "".join(line["message"]["content"] for line in lines) == SAID


def test_a_prompt_has_a_system_prompt_before_it(client: ollama.Client) -> None:
    assert client.generate(MODEL, "hello", system="rules").response == "<system>rules<user>hello"


def test_options_are_sampling_parameters(http: httpx.Client, engine: FakeEngine) -> None:
    options = {
        "num_predict": -1,
        "top_k": 5,
        "top_p": 0.5,
        "min_p": 0.1,
        "typical_p": 0.9,
        "stop": ["zz"],
        "repeat_penalty": 1.5,
        "repeat_last_n": 9,
        "presence_penalty": 0.25,
        "frequency_penalty": 0.75,
        "num_ctx": 4096,
        "mirostat": 1,
        "seed": None,
    }
    body = {"model": MODEL, "messages": ASKED, "stream": False, "options": options}
    assert http.post("/api/chat", json=body).status_code == 200
    ((_, params),) = engine.seen
    assert params.max_tokens is None
    assert (params.top_k, params.top_p, params.min_p, params.typical_p, params.stop) == (5, 0.5, 0.1, 0.9, ("zz",))
    assert (params.repetition_penalty, params.repeat_last_n) == (1.5, 9)
    assert (params.presence_penalty, params.frequency_penalty) == (0.25, 0.75)


def test_reasons_to_end(client: ollama.Client) -> None:
    assert client.chat(MODEL, ASKED, options={"num_predict": 3}).done_reason == "length"
    stopped = client.chat(MODEL, ASKED, options={"stop": "er>"})
    assert (stopped.done_reason, stopped.message.content) == ("stop", "<us")


@pytest.mark.parametrize(("think", "effort"), [(None, None), (False, "none"), (True, "medium"), ("high", "high")])
def test_thinking_is_an_effort(client: ollama.Client, engine: FakeEngine, think: Any, effort: str | None) -> None:
    client.chat(MODEL, ASKED, think=think)
    assert engine.rendered[-1]["effort"] == effort


def test_logprobs(http: httpx.Client) -> None:
    """Each token is in one line of a stream."""
    body = {"model": MODEL, "prompt": "hello", "raw": True, "logprobs": True, "top_logprobs": 2}
    whole = http.post("/api/generate", json=body | {"stream": False}).json()["logprobs"]
    assert [one["token"] for one in whole] == list("hello")
    assert [len(one["top_logprobs"]) for one in whole] == [2] * 5
    lines = [json.loads(line) for line in http.post("/api/generate", json=body).text.splitlines()]
    assert [one for line in lines for one in line.get("logprobs", ())] == whole


def test_calls_and_results_are_rendered(client: ollama.Client) -> None:
    messages: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
        {"role": "tool", "content": "d", "tool_name": "f"},
    ]
    text = client.chat(MODEL, messages).message.content
    call = {"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    assert text == "<user>a<assistant>" + json.dumps({"tool_calls": [call]}) + "<tool>d"


@pytest.mark.parametrize(
    ("route", "changes", "message"),
    [
        ("chat", {"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role must be"),
        (
            "chat",
            {"messages": [{"role": "user", "content": "x", "images": ["aa"]}]},
            "messages[0].images[0]: this model takes no images",
        ),
        ("chat", {"format": "xml"}, 'format must be "json" or a JSON schema'),
        ("chat", {"format": {"x-guidance": {}}}, "format: a schema cannot have x-guidance; remove it"),
        ("chat", {"think": "perhaps"}, "think must be true, false, or one of none, minimal"),
        ("chat", {"options": {"temperature": -1.0}}, "temperature"),
        ("chat", {"options": {"top_k": "5"}}, "top_k must be a whole number from 0"),
        ("chat", {"top_logprobs": 2}, "top_logprobs needs logprobs"),
        ("chat", {"keep_alive": "soon"}, "keep_alive must be a time like 30s"),
        ("generate", {"suffix": "x"}, "suffix"),
        ("generate", {"template": "x"}, "template"),
        ("generate", {"context": [1]}, "context must have at most 0 items"),
        ("generate", {"images": ["aa"]}, "images[0]: this model takes no images"),
        ("generate", {"model": ""}, "model is required"),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, route: str, changes: dict[str, Any], message: str) -> None:
    asked = {"messages": ASKED} if route == "chat" else {"prompt": "a"}
    response = http.post(f"/api/{route}", json={"model": MODEL, **asked, **changes})
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]


def test_an_unknown_model_is_not_found(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError) as caught:
        client.chat("another", ASKED)
    assert caught.value.status_code == 404


def test_an_error_after_the_first_line_is_one_more_line(client: ollama.Client, engine: FakeEngine) -> None:
    with engine.scripted(fail=Overloaded("full"), fail_at=2), pytest.raises(ollama.ResponseError, match="full"):
        list(client.chat(MODEL, ASKED, stream=True))


def test_a_prompt_that_is_too_long_is_refused_where_turns_must_stay(http: httpx.Client) -> None:
    """By default the oldest turns are omitted, as Ollama does."""
    messages = [
        {"role": "user", "content": "a" * CONTEXT},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "c"},
    ]
    body = {"model": MODEL, "messages": messages, "stream": False, "options": {"num_predict": 5}}
    assert http.post("/api/chat", json=body | {"truncate": False}).status_code == 400
    assert http.post("/api/chat", json=body).json()["message"]["content"] == "<user"


def test_a_model_without_a_chat_template_continues_prompts() -> None:
    with (
        FakeEngine(FakeModel(has_chat=False, chat_template=None)) as engine,
        Server(engine, ServeSettings(port=0)) as server,
    ):
        body = {"model": MODEL, "prompt": "hello", "stream": False}
        assert httpx.post(f"{server.url}/api/generate", json=body).json()["response"] == "hello"
        refused = httpx.post(f"{server.url}/api/generate", json=body | {"system": "s"})
        assert (refused.status_code, "put it into prompt" in refused.json()["error"]) == (400, True)


def test_what_a_model_can_is_shown(http: httpx.Client, engine: FakeEngine) -> None:
    """Clients send tools only to a model that has them."""
    assert http.post("/api/show", json={"model": MODEL}).json()["capabilities"] == ["completion"]
    engine.replies.use(known('<tool_call> "arguments" <think>'))
    assert http.post("/api/show", json={"model": MODEL}).json()["capabilities"] == ["completion", "tools", "thinking"]


@pytest.mark.parametrize("kind", [None, "application/x-www-form-urlencoded", "text/plain"])
def test_a_body_of_any_content_type_is_accepted_but_from_a_page_of_another_site(http, engine, kind) -> None:
    """litellm sends none to Ollama's routes, and curl that of a form. A page may send such a body to any server; its
    browser says so."""
    typed = {} if kind is None else {"content-type": kind}
    body = json.dumps({"model": MODEL, "messages": ASKED, "stream": False})
    assert http.post("/api/chat", content=body, headers=typed).status_code == 200
    for header in ({"origin": "http://evil.com"}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}):
        assert http.post("/api/chat", content=body, headers=header | typed).status_code == 415
    assert http.post("/v1/chat/completions", content=body, headers=typed).status_code == 415
    assert len(engine.seen) == 1
