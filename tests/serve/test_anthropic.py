"""Anthropic's API: its own package, sync and async, with the server; and what the package does not show."""

import asyncio
import json
from typing import Any

import anthropic
import httpx
import pytest

from kvcellar.errors import Overloaded
from kvcellar.serve import Server, ServeSettings, key_digest
from tests.serve.fake_engine import PATIENCE, FakeEngine
from tests.serve.wire import MODEL

ASKED = [{"role": "user", "content": "hi"}]
SAID = "<user>hi"


@pytest.fixture(scope="module")
def shared_client(server: Server):
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def client(shared_client: anthropic.Anthropic, engine: FakeEngine) -> anthropic.Anthropic:
    return shared_client


def ask(client: anthropic.Anthropic, **options: Any) -> Any:
    return client.messages.create(**{"model": MODEL, "max_tokens": 100, "messages": ASKED, **options})


def test_a_message(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    """The client fails on a message without its usage, and finds the id of the request in a header of its own."""
    with engine.scripted(cached=3):
        message = ask(client, extra_body={"temperature": 0.5, "top_k": 7, "top_p": 0.9}, stop_sequences=["zz"])
    assert [(block.type, block.text) for block in message.content] == [("text", SAID)]
    assert (message.role, message.model, message.stop_reason, message.stop_sequence) == (
        "assistant",
        MODEL,
        "end_turn",
        None,
    )
    assert (message.usage.input_tokens, message.usage.cache_read_input_tokens) == (len(SAID) - 3, 3)
    assert (message.usage.cache_creation_input_tokens, message.usage.output_tokens) == (0, len(SAID))
    assert message._request_id.startswith("req-")
    ((_, params),) = engine.seen
    assert (params.temperature, params.top_k, params.top_p, params.stop, params.max_tokens) == (
        0.5,
        7,
        0.9,
        ("zz",),
        100,
    )


def test_reasons_to_stop(client: anthropic.Anthropic) -> None:
    assert ask(client, max_tokens=3).stop_reason == "max_tokens"
    stopped = ask(client, stop_sequences=["er>"])
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "er>", "<us")


def test_a_stream_adds_up_to_the_message(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    """The client's own accumulation fails on events in another order."""
    with engine.scripted(cached=2):
        whole = ask(client)
        with client.messages.stream(model=MODEL, max_tokens=100, messages=ASKED) as stream:
            events = list(stream)
            streamed = stream.get_final_message()
    assert [block.text for block in streamed.content] == [block.text for block in whole.content]
    assert streamed.usage.model_dump() == whole.usage.model_dump()
    assert (streamed.stop_reason, streamed.id.startswith("msg_")) == (whole.stop_reason, True)
    start = events[0].message.usage
    assert (start.cache_read_input_tokens, start.input_tokens, start.output_tokens) == (2, len(SAID) - 2, 1)


def test_a_reply_without_text_is_a_message_without_blocks(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    with engine.scripted(output=b"", cached=1):
        assert ask(client).content == []
        with client.messages.stream(model=MODEL, max_tokens=100, messages=ASKED) as stream:
            assert stream.get_final_message().content == []
            assert stream.get_final_message().usage.cache_read_input_tokens == 1


def test_blocks_become_messages_of_the_template(client: anthropic.Anthropic) -> None:
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "x"},
                {"type": "text", "text": "c"},
                {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"x": 1}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "d"}]},
                {"type": "text", "text": "e"},
            ],
        },
        {"role": "assistant", "content": "f"},
        {"role": "user", "content": "g"},
    ]
    text = ask(client, max_tokens=2000, system=[{"type": "text", "text": "s"}], messages=messages).content[0].text
    call = {"id": "toolu_1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    said = json.dumps({"reasoning_content": "hm", "tool_calls": [call]})
    assert text == (
        "<system>s<user>a\nb<assistant>c" + said + '<tool>d{"tool_call_id": "toolu_1"}<user>e<assistant>f<user>g'
    )


def test_a_failed_tool_is_told_to_the_model(client: anthropic.Anthropic) -> None:
    messages: Any = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": "no", "is_error": True}]},
    ]
    assert "<tool>Error: no{" in ask(client, max_tokens=2000, messages=messages).content[0].text


@pytest.mark.parametrize(("ttl", "seconds"), [(None, 300.0), ("5m", 300.0), ("1h", 3600.0)])
def test_breakpoints_are_positions_to_resume_at_with_a_lifetime(
    client: anthropic.Anthropic, engine: FakeEngine, ttl: str | None, seconds: float
) -> None:
    """What was computed before the last breakpoint is counted as written to the cache."""
    mark = {"type": "ephemeral", **({} if ttl is None else {"ttl": ttl})}
    system: Any = [{"type": "text", "text": "rules", "cache_control": mark}]
    with engine.scripted(cached=4):
        usage = ask(client, system=system).usage
    marked = len("<system>rules<user>")
    assert engine.breakpoints[-1] == (marked,)
    retention = engine.retentions[-1]
    assert retention is not None
    assert (retention.ttl, retention.recurring) == (seconds, True)
    assert (usage.input_tokens, usage.cache_read_input_tokens, usage.cache_creation_input_tokens) == (2, 4, marked - 4)
    hour = usage.cache_creation.ephemeral_1h_input_tokens
    assert hour == (marked - 4 if ttl == "1h" else 0)


def test_without_breakpoints_nothing_is_said_about_lifetimes(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    ask(client)
    assert engine.breakpoints[-1] == ()
    assert engine.retentions[-1] is not None
    assert engine.retentions[-1].ttl is None


def test_a_breakpoint_at_the_end_of_the_request(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    ask(client, extra_body={"cache_control": {"type": "ephemeral"}})
    assert engine.breakpoints[-1] == (len(SAID),)


def test_tokens_are_counted_without_running(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    found = client.messages.count_tokens(model=MODEL, system="s", messages=ASKED)
    assert found.input_tokens == len("<system>s" + SAID)
    assert not engine.seen
    assert client.beta.messages.count_tokens(model=MODEL, messages=ASKED, betas=["x"]).input_tokens == len(SAID)


def test_models_are_listed(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_tokens": None}, "max_tokens must be an integer"),
        ({"messages": []}, "messages must not be empty"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "source.type is required"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "the type 'document'"),
        ({"messages": [{"role": "user", "content": []}]}, "messages[0].content is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role must be"),
        ({"system": [{"type": "image"}]}, "system[0] has the type 'image'"),
        ({"temperature": -1.0}, "temperature"),
        ({"container": "x"}, "container must be null"),
        ({"mcp_servers": [{}]}, "mcp_servers must have at most 0 items"),
        (
            {
                "messages": [
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "a"}, {"type": "tool_result", "tool_use_id": "1"}],
                    }
                ]
            },
            "results come first",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {"type": "ephemeral"}}]}
                ]
                * 5
            },
            "at most 4 blocks may have cache_control",
        ),
    ],
)
def test_what_is_wrong_is_named(http: httpx.Client, changes: dict[str, Any], message: str) -> None:
    body = {"model": MODEL, "max_tokens": 5, "messages": ASKED, **changes}
    response = http.post("/v1/messages", json=body)
    assert response.status_code == 400
    found = response.json()
    assert found["type"] == "error"
    assert found["error"]["type"] == "invalid_request_error"
    assert message in found["error"]["message"]


def test_fields_of_betas_are_ignored(http: httpx.Client) -> None:
    extra = {"context_management": {"edits": []}, "betas": ["x"], "service_tier": "auto", "some_new_field": 1}
    body = {"model": MODEL, "max_tokens": 50, "messages": ASKED, **extra}
    assert http.post("/v1/messages?beta=true", json=body).json()["content"][0]["text"] == SAID


def test_errors_have_the_types_that_the_client_knows(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    with pytest.raises(anthropic.NotFoundError):
        ask(client, model="another")
    with engine.scripted(reject=Overloaded("full")), pytest.raises(anthropic.APIStatusError) as caught:
        ask(client)
    assert caught.value.status_code == 503
    assert caught.value.body["error"]["type"] == "overloaded_error"


def test_an_error_in_a_stream_is_an_event(client: anthropic.Anthropic, engine: FakeEngine) -> None:
    with engine.scripted(fail=Overloaded("full"), fail_at=2), pytest.raises(anthropic.APIStatusError, match="full"):
        with client.messages.stream(model=MODEL, max_tokens=100, messages=ASKED) as stream:
            list(stream)


def test_a_key_may_be_in_either_header() -> None:
    settings = ServeSettings(port=0, key_digests=(key_digest("secret-key"),))
    with FakeEngine() as engine, Server(engine, settings) as server:
        for headers in ({"x-api-key": "secret-key"}, {"authorization": "Bearer secret-key"}):
            assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200
        refused = httpx.post(f"{server.url}/v1/messages", headers={"x-api-key": "wrong"}, json={})
        assert (refused.status_code, refused.json()["error"]["type"]) == (401, "authentication_error")
        both = [("x-api-key", "secret-key"), ("x-api-key", "secret-key")]
        assert httpx.get(f"{server.url}/v1/models", headers=both).status_code == 401


def test_the_async_client(server: Server, engine: FakeEngine) -> None:
    async def run() -> str:
        async with anthropic.AsyncAnthropic(base_url=server.url, api_key="any", timeout=PATIENCE) as client:
            async with client.messages.stream(model=MODEL, max_tokens=50, messages=ASKED) as stream:
                return "".join([text async for text in stream.text_stream])

    assert asyncio.run(run()) == SAID
