"""A last message of the assistant that the answer continues: which fields of each API ask for it, the same prompt for
all of them, and what is refused."""

from collections.abc import Iterator
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from kvcellar import Engine
from kvcellar.serve import Server, ServeSettings
from tests.serve.declared import DeclaredClient
from tests.serve.every_api import tiny_engine
from tests.serve.fake_engine import PATIENCE

USER = {"role": "user", "content": "Which hill is the highest?"}
BEGUN = {"role": "assistant", "content": "The highest"}
TALK = [USER, BEGUN]
CHAT, RESPONSES, MESSAGES, OLLAMA = "/v1/chat/completions", "/v1/responses", "/v1/messages", "/api/chat"
TOKENS = 8
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny_engine(tmp_path_factory.mktemp("tiny", numbered=False)) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with Server(engine, ServeSettings(port=0)) as server:
        yield server


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with DeclaredClient(base_url=server.url, timeout=PATIENCE) as http:
        yield http


ASKED: dict[str, tuple[str, dict[str, Any]]] = {
    "vLLM": (CHAT, {"messages": TALK, "continue_final_message": True, "add_generation_prompt": False}),
    "vLLM, without the other field": (CHAT, {"messages": TALK, "continue_final_message": True}),
    "DeepSeek": (CHAT, {"messages": [USER, {**BEGUN, "prefix": True}]}),
    "parts": (
        CHAT,
        {"messages": [USER, {**BEGUN, "content": [{"type": "text", "text": BEGUN["content"]}], "prefix": True}]},
    ),
    "Anthropic": (MESSAGES, {"messages": TALK}),
    "Responses": (RESPONSES, {"input": [USER, {**BEGUN, "status": "incomplete"}]}),
    "Ollama": (OLLAMA, {"messages": TALK, "stream": False, "options": {"num_predict": TOKENS, "temperature": 0}}),
}
LIMITS = {CHAT: "max_tokens", MESSAGES: "max_tokens", RESPONSES: "max_output_tokens"}


def answer_of(path: str, body: Any) -> tuple[str, int]:
    """The text of an answer, and the tokens of its prompt."""
    if path == CHAT:
        return body["choices"][0]["message"]["content"], body["usage"]["prompt_tokens"]
    if path == RESPONSES:
        text = "".join(part["text"] for item in body["output"] for part in item["content"])
        return text, body["usage"]["input_tokens"]
    if path == MESSAGES:
        used = body["usage"]
        prompt = used["input_tokens"] + used["cache_read_input_tokens"] + used["cache_creation_input_tokens"]
        return "".join(block["text"] for block in body["content"]), prompt
    return body["message"]["content"], body["prompt_eval_count"]


def asked(http: httpx.Client, path: str, body: dict[str, Any]) -> tuple[str, int]:
    limit = {LIMITS[path]: TOKENS, "temperature": 0} if path in LIMITS else {}
    response = http.post(path, json={"model": "tiny", **limit, **body})
    assert response.status_code == 200, response.text
    return answer_of(path, response.json())


def test_all_apis_continue_a_message_alike(http: httpx.Client, engine: Engine) -> None:
    ids = engine.render(TALK, continue_final_message=True)
    assert engine.decode(ids).endswith("The highest")
    told = engine.generate(ids, max_tokens=TOKENS, temperature=0.0)
    for name, (path, body) in ASKED.items():
        text, tokens = asked(http, path, body)
        assert (name, tokens) == (name, len(ids))
        assert text.strip() == told.text.strip(), name


@pytest.mark.parametrize(
    ("path", "messages"), [(CHAT, TALK), (RESPONSES, TALK), (OLLAMA, [USER, {**BEGUN, "content": ""}])]
)
def test_otherwise_a_new_message_is_begun(http: httpx.Client, engine: Engine, path: str, messages: Any) -> None:
    body = {"input": messages} if path == RESPONSES else {"messages": messages}
    if path == OLLAMA:
        body |= {"stream": False, "options": {"num_predict": 1}}
    assert asked(http, path, body)[1] == len(engine.render(messages))


def test_tokens_are_counted_as_they_are_sent(http: httpx.Client, engine: Engine) -> None:
    expected = len(engine.render(TALK, continue_final_message=True))
    counted = http.post(f"{MESSAGES}/count_tokens", json={"messages": TALK}).json()
    assert counted == {"input_tokens": expected}
    counted = http.post(f"{RESPONSES}/input_tokens", json=ASKED["Responses"][1]).json()
    assert counted["input_tokens"] == expected


def test_the_official_clients_continue_a_message(server: Server, engine: Engine) -> None:
    model = engine.model.name
    ids = engine.render(TALK, continue_final_message=True)
    text = engine.generate(ids, max_tokens=TOKENS, temperature=0.0).text.strip()
    with anthropic.Anthropic(base_url=server.url, api_key="any", max_retries=0) as client:
        how: Any = {"model": model, "max_tokens": TOKENS, "messages": TALK, "extra_body": {"temperature": 0}}
        message = client.messages.create(**how)
        assert "".join(block.text for block in message.content if block.type == "text").strip() == text
        with client.messages.stream(**how) as stream:
            assert stream.get_final_text().strip() == text
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
        chat: Any = {
            "model": model,
            "max_tokens": TOKENS,
            "temperature": 0,
            "messages": [USER, {**BEGUN, "prefix": True}],
        }
        answer = client.chat.completions.create(**chat).choices[0].message.content
        assert (answer or "").strip() == text
    with ollama.Client(host=server.url, trust_env=False) as client:
        said = client.chat(model, TALK, options={"num_predict": TOKENS, "temperature": 0})
        assert (said.message.content or "").strip() == text


def test_a_response_that_continues_a_message_is_continued_as_one_message(http: httpx.Client, engine: Engine) -> None:
    body = {**ASKED["Responses"][1], "max_output_tokens": TOKENS, "temperature": 0}
    first = http.post(RESPONSES, json=body).json()
    text, _ = answer_of(RESPONSES, first)
    next_user = {"role": "user", "content": "And then?"}
    whole = [USER, {**BEGUN, "content": BEGUN["content"] + text}, next_user]
    later = {"input": [next_user], "previous_response_id": first["id"], "max_output_tokens": 1}
    counted = http.post(RESPONSES, json=later).json()["usage"]["input_tokens"]
    own = len(engine.render(whole))
    assert counted == own
    items = http.get(f"{RESPONSES}/{first['id']}/input_items?order=asc").json()["data"]
    assert [item["role"] for item in items] == ["user", "assistant"]


def test_breakpoints_stand_in_front_of_a_continued_message_and_behind_it(http: httpx.Client, engine: Engine) -> None:
    mark = {"cache_control": {"type": "ephemeral"}}
    marked = [{**one, "content": [{"type": "text", "text": one["content"], **mark}]} for one in TALK]
    for body in ({"messages": TALK, **mark}, {"messages": marked}):
        assert asked(http, MESSAGES, body)[1] == len(engine.render(TALK, continue_final_message=True))


@pytest.mark.parametrize("path", [OLLAMA, RESPONSES])
def test_the_oldest_turns_before_a_continued_message_are_omitted(http: httpx.Client, engine: Engine, path: str) -> None:
    old = [{"role": "user", "content": "hill " * 200}, {"role": "assistant", "content": "river " * 200}] * 6
    body = {"messages": [*old, *TALK], "stream": False, "options": {"num_predict": 1}}
    if path == RESPONSES:
        body = {"input": [*old, USER, {**BEGUN, "status": "in_progress"}], "truncation": "auto"}
    tokens = asked(http, path, body)[1]
    assert len(engine.render(TALK, continue_final_message=True)) <= tokens <= engine.model.context
    assert tokens < len(engine.render([*old, *TALK], continue_final_message=True))


CALLS = {"role": "assistant", "content": "a", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}
USED = {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": {}}]}
REFUSED: list[tuple[str, dict[str, Any], str, str]] = [
    (CHAT, {"messages": [USER], "continue_final_message": True}, "messages", "messages[0] cannot be continued"),
    (CHAT, {"messages": [{**USER, "prefix": True}]}, "messages", "messages[0] cannot be continued"),
    (
        CHAT,
        {"messages": [USER, {**BEGUN, "prefix": True}, USER]},
        "messages[1].prefix",
        "messages[1].prefix must not be true: only the last message can be continued",
    ),
    (CHAT, {"messages": [USER, CALLS], "continue_final_message": True}, "messages", "it has calls of tools"),
    (
        CHAT,
        {"messages": TALK, "continue_final_message": True, "add_generation_prompt": True},
        "add_generation_prompt",
        "add_generation_prompt must not be true where the last message is continued",
    ),
    (
        CHAT,
        {"messages": TALK, "continue_final_message": True, "tools": [TOOL], "tool_choice": "required"},
        "tool_choice",
        "tool_choice cannot require a call where the answer continues a message",
    ),
    (MESSAGES, {"messages": [USER, {**BEGUN, "content": "The "}], "max_tokens": 4}, "", "cannot end with white space"),
    (MESSAGES, {"messages": [USER, USED], "max_tokens": 4}, "", "messages[1].content cannot be continued: it has"),
    (
        MESSAGES,
        {"messages": TALK, "max_tokens": 4, "thinking": {"type": "enabled", "budget_tokens": 10}},
        "",
        "thinking cannot be enabled where the answer continues the last message",
    ),
    (
        MESSAGES,
        {
            "messages": TALK, "max_tokens": 4, "tool_choice": {"type": "any"},
            "tools": [{"name": "f", "input_schema": {"type": "object"}}],
        },
        "",
        "tool_choice cannot require a call",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "message"), REFUSED)
def test_what_cannot_be_continued_is_refused(
    http: httpx.Client, path: str, body: dict[str, Any], param: str, message: str
) -> None:
    response = http.post(path, json=body)
    assert response.status_code == 400, response.text
    assert message in response.json()["error"]["message"]
    assert response.json()["error"].get("param", "") == param


def test_a_conversation_continues_no_message(http: httpx.Client) -> None:
    assert http.post("/kvcellar/conversations", json={"name": "hills"}).status_code == 201
    response = http.post(CHAT, json={"messages": TALK, "continue_final_message": True, "conversation": "hills"})
    assert (response.status_code, response.json()["error"]["param"]) == (400, "conversation")


def test_reasoning_that_a_message_has_begun_goes_on(http: httpx.Client) -> None:
    """The end of the reasoning is not in the text of this model, so all of the answer is reasoning."""
    body = {"messages": [USER, {"role": "assistant", "content": "<think>\nWell", "prefix": True}], "max_tokens": TOKENS}
    message = http.post(CHAT, json={**body, "temperature": 0}).json()["choices"][0]["message"]
    assert (message["content"], bool(message["reasoning_content"])) == ("", True)


def test_an_answer_that_was_cut_off_is_continued_as_if_it_was_not() -> None:
    """Where the template writes nothing else in front of it; also its tokens are in memory."""
    body: dict[str, Any] = {"messages": [{"role": "user", "content": "Name all rivers."}], "temperature": 0}
    body |= {"ignore_eos": True, "return_token_ids": True}
    with (
        Engine(cache_bytes=16_000_000, threads=1, device="cpu") as engine,
        Server(engine, ServeSettings(port=0)) as one,
    ):
        with DeclaredClient(base_url=one.url, timeout=PATIENCE) as http:
            whole = http.post(CHAT, json={**body, "max_tokens": 16}).json()
            ids, prompt = whole["choices"][0]["token_ids"], whole["prompt_token_ids"]
            compared = 0
            for cut in range(4, 14):
                half = http.post(CHAT, json={**body, "max_tokens": cut}).json()["choices"][0]
                begun = {"role": "assistant", "content": half["message"]["content"], "prefix": True}
                asked = {**body, "messages": [*body["messages"], begun], "max_tokens": 16 - cut}
                rest = http.post(CHAT, json=asked).json()
                if rest["prompt_token_ids"] == [*prompt, *ids[:cut]]:
                    compared += 1
                    assert rest["choices"][0]["token_ids"] == ids[cut:]
                    assert (
                        begun["content"] + rest["choices"][0]["message"]["content"]
                        == (whole["choices"][0]["message"]["content"])
                    )
                    assert rest["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(prompt)
            assert compared > 3
