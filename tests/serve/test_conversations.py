"""Named conversations over HTTP: each turn is answered as its whole prompt would be, computes only what is new, and is
added as a whole or not at all; a conversation belongs to an API key."""

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvcellar import Engine
from kvcellar.errors import ConversationNotSaved
from kvcellar.memory.tiers.archive import file_of
from kvcellar.serve import Server, ServeSettings, key_digest
from tests.engine.mixes import made, tokens
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import PATIENCE, FakeEngine
from tests.serve.wire import CHAT, COMPLETIONS, error_of
from tests.zoo import ARCHS

PATH = "/kvcellar/conversations"
KEYS = ("one-key-of-the-server", "another-key-of-the-server")
KINDS = ["llama", "gemma3", "lfm2"]  # full, sliding, hybrid


@pytest.fixture
def chat(http: httpx.Client, engine: FakeEngine) -> Iterator[str]:
    """An empty chat of the fake engine, which repeats its prompt."""
    assert http.post(PATH, json={"name": "a"}).status_code == 201
    yield "a"
    for found in http.get(PATH).json()["data"]:
        http.delete(f"{PATH}/{found['name']}")


def messages(http: httpx.Client, name: str) -> list[dict[str, str]]:
    return http.get(f"{PATH}/{name}").json()["messages"]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def turn(http: httpx.Client, text: str, **fields: Any) -> httpx.Response:
    return http.post(CHAT, json={"messages": [user(text)], "conversation": "a", **fields})


def until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


# -- turns ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_each_turn_continues_what_was_said_and_is_added(http, engine, chat, stream) -> None:
    assert turn(http, "x", stream=stream).status_code == 200
    assert messages(http, "a") == [user("x"), said("<user>x")]
    with engine.scripted(output=b"yes"):
        turn(http, "y", stream=stream)
    prompt = "<user>x<assistant><user>x<user>y"
    assert bytes(engine.seen[-1][0]).decode() == prompt
    assert messages(http, "a") == [user("x"), said("<user>x"), user("y"), said("yes")]
    (info,) = http.get(PATH).json()["data"]
    assert (info["name"], info["kind"], info["turns"], info["messages_count"]) == ("a", "chat", 2, 4)


def test_what_ended_at_a_stop_string_is_added_without_it(http, engine, chat) -> None:
    with engine.scripted(output=b"one, two, three"):
        turn(http, "count", stop=["two"])
    assert messages(http, "a")[-1] == said("one, ")
    assert engine.conversations.read("a")[1].tokens == list(b"<user>countone, ")


def test_a_conversation_begins_with_the_messages_that_it_was_created_with(http, engine, chat) -> None:
    given = [{"role": "developer", "content": "short"}, user("x"), said("y")]
    assert http.post(PATH, json={"name": "b", "messages": given}).json()["messages_count"] == 3
    http.post(CHAT, json={"messages": [user("z")], "conversation": "b"})
    assert bytes(engine.seen[-1][0]) == b"<system>short<user>x<assistant>y<user>z"
    assert http.post(f"{PATH}/b/rewind", json={}).json()["messages_count"] == 3


def test_a_text_is_continued_by_completions(http, engine, chat) -> None:
    http.post(PATH, json={"name": "t", "prompt": "one "})
    with engine.scripted(output=b"two "):
        http.post(COMPLETIONS, json={"prompt": "", "conversation": "t"})
        http.post(COMPLETIONS, json={"prompt": list(b"and "), "conversation": "t"})
    assert [bytes(prompt) for prompt, _ in engine.seen] == [b"one ", b"one two and "]
    found = http.get(f"{PATH}/t").json()
    assert bytes(found["token_ids"]) == b"one two and two "
    assert (found["kind"], found["turns"], found["tokens_count"]) == ("text", 2, 16)


def test_forks_are_apart_and_a_rewind_discards_turns(http, engine, chat) -> None:
    for text in "xyz":
        turn(http, text)
    assert http.post(f"{PATH}/a/fork", json={"to": "b"}).status_code == 201
    assert http.post(f"{PATH}/a/rewind", json={"turns": 2}).json()["turns"] == 1
    assert messages(http, "a") == [user("x"), said("<user>x")]
    assert len(messages(http, "b")) == 6
    assert http.delete(f"{PATH}/a").json() == {"object": "conversation.deleted", "name": "a", "deleted": True}
    assert http.get(f"{PATH}/a").status_code == 404
    assert [info["name"] for info in http.get(PATH).json()["data"]] == ["b"]


# -- turns that do not end --------------------------------------------------------------------------------------------


def unchanged(http: httpx.Client, engine: FakeEngine) -> None:
    """The conversation is empty, and free for the next request."""
    assert engine.rest()
    until(lambda: http.post(f"{PATH}/a/rewind", json={"turns": 0}).status_code == 200)  # its request is about to end
    assert messages(http, "a") == []


@pytest.mark.parametrize("stream", [False, True])
def test_a_turn_that_fails_changes_nothing(http, engine, chat, stream) -> None:
    for changes in ({"fail": RuntimeError("x"), "fail_at": 2}, {"reject": RuntimeError("x")}):
        with engine.scripted(**changes):
            turn(http, "x", stream=stream)
        unchanged(http, engine)
    assert turn(http, "x" * 30_000, stream=stream).status_code == 400
    assert turn(http, "x", stream=stream, temperature=-1).status_code == 400
    unchanged(http, engine)


def test_a_turn_whose_client_leaves_changes_nothing(http, engine, chat, server) -> None:
    with engine.scripted(delay=0.01):
        body = {"messages": [user("x" * 500)], "conversation": "a", "stream": True}
        with httpx.stream("POST", server.url + CHAT, json=body) as response:
            next(response.iter_lines())
    assert engine.cancelled(1)
    unchanged(http, engine)


def test_a_turn_that_cannot_be_saved_fails(http, engine, chat, monkeypatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise ConversationNotSaved("the conversation a cannot be saved: No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(engine.conversations, "_put_held", fails)
        assert error_of(turn(http, "x"))["code"] == "conversation_not_saved"
        lines = [line for line in turn(http, "x", stream=True).text.split("\n\n") if line]
        assert "conversation_not_saved" in lines[-1], "and not [DONE]"
    unchanged(http, engine)


def test_a_conversation_is_busy_with_one_turn_at_a_time(http, engine, chat) -> None:
    gate = threading.Event()
    with engine.scripted(gate=gate):
        first = threading.Thread(target=lambda: turn(http, "x"))
        first.start()
        until(lambda: engine.running)
    calls = (
        lambda: turn(http, "y"),
        lambda: http.post(f"{PATH}/a/rewind", json={}),
        lambda: http.delete(f"{PATH}/a"),
    )
    for call in calls:
        response = call()
        assert (response.status_code, error_of(response)["code"]) == (409, "conversation_conflict")
    assert messages(http, "a") == []
    assert http.post(f"{PATH}/a/fork", json={"to": "b"}).status_code == 201
    gate.set()
    first.join()
    assert messages(http, "a") == [user("x"), said("<user>x")]


# -- the real engine --------------------------------------------------------------------------------------------------


@contextmanager
def served(engine: Engine, *keys: str) -> Iterator[httpx.Client]:
    with Server(engine, ServeSettings(port=0, key_digests=tuple(map(key_digest, keys)))) as server:
        with DeclaredClient(base_url=server.url, timeout=PATIENCE) as client:
            yield client


def test_another_key_finds_no_conversation() -> None:
    with FakeEngine() as engine, served(engine, *KEYS) as client:  # type: ignore[arg-type]
        own, other = ({"authorization": f"Bearer {key}"} for key in KEYS)
        assert client.post(PATH, json={"name": "a"}, headers=own).status_code == 201
        calls: list[tuple[str, str, dict[str, Any] | None]] = [
            ("GET", f"{PATH}/a", None),
            ("DELETE", f"{PATH}/a", None),
            ("POST", f"{PATH}/a/fork", {"to": "b"}),
            ("POST", f"{PATH}/a/rewind", {}),
            ("POST", CHAT, {"messages": [user("x")], "conversation": "a"}),
        ]
        for method, path, body in calls:
            response = client.request(method, path, json=body, headers=other)
            assert (response.status_code, error_of(response)["code"]) == (404, "conversation_not_found")
            assert client.request(method, path, json=body).status_code == 401
        assert client.get(PATH, headers=other).json()["data"] == []
        assert client.post(PATH, json={"name": "a"}, headers=other).status_code == 201
        assert len(client.get(PATH, headers=own).json()["data"]) == 1


@pytest.mark.parametrize("name", KINDS)
def test_each_turn_equals_its_whole_prompt_and_computes_what_is_new(name) -> None:
    draw, how = random.Random(name), {"max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    limits = {"cache_bytes": 40_000_000}
    with made(ARCHS[name].build(), **limits) as engine, made(ARCHS[name].build(), **limits) as cold:
        with served(engine) as client:
            text = list(tokens(draw, 8))
            client.post(PATH, json={"name": "a", "prompt": text})
            for _ in range(6):
                known = len(text) - 1 if len(text) > 8 else 0  # the last token of an answer was not computed
                new = list(tokens(draw, 8))
                found = client.post(COMPLETIONS, json={"prompt": new, "conversation": "a", **how}).json()
                text += new
                cold.clear_cache()
                answer = cold.generate(text, max_tokens=6, temperature=0.0, ignore_eos=True).token_ids
                assert found["choices"][0]["token_ids"] == list(answer)
                usage = found["usage"]
                assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (len(text), known)
                text += answer
            assert client.get(f"{PATH}/a").json()["token_ids"] == text


def test_a_chat_survives_a_restart_and_is_found_by_the_library(tmp_path: Path) -> None:
    """Of the embedded model, with OpenAI's client."""
    limits = {"dtype": "float32", "device": "cpu", "cache_bytes": 32_000_000, "threads": 1, "store": str(tmp_path)}
    how: dict[str, Any] = {"temperature": 0, "max_tokens": 6, "extra_body": {"conversation": "a"}}
    asked, answers = ["def add(a, b):", "class Dog:", "import os"], []
    for text in asked:
        with Engine(**limits) as engine, served(engine) as client:
            if not answers:
                client.post(PATH, json={"name": "a", "messages": [{"role": "system", "content": "Short. " * 40}]})
            with openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="any", max_retries=0) as sdk:
                found = sdk.chat.completions.create(model=engine.model.name, messages=[user(text)], **how)
            answers.append(found.choices[0].message.content)
            cached = found.usage.prompt_tokens_details.cached_tokens
            assert cached > 64 or len(answers) == 1, "the system message was stored"
            said_before = engine.load("a").messages
    whole = [message for pair in zip(map(user, asked), map(said, answers), strict=True) for message in pair]
    assert said_before[1:] == whole
    with Engine(**{**limits, "store": None}) as cold:
        assert cold.chat(said_before[:-1], temperature=0.0, max_tokens=6).text == answers[-1]


def test_a_damaged_file_is_reported_and_can_be_deleted(tmp_path: Path) -> None:
    limits = {"dtype": "float32", "device": "cpu", "cache_bytes": 16_000_000, "threads": 1, "store": str(tmp_path)}
    with Engine(**limits) as engine, served(engine) as client:
        for name in "ab":
            client.post(PATH, json={"name": name})
        (tmp_path / "conversations" / file_of("", "a")).write_bytes(b"kvc-docs and nothing else")
        for response in (client.get(f"{PATH}/a"), turn(client, "x"), client.post(f"{PATH}/a/rewind", json={})):
            assert (response.status_code, error_of(response)["code"]) == (409, "conversation_unreadable")
        assert [info["name"] for info in client.get(PATH).json()["data"]] == ["b"]
        assert client.delete(f"{PATH}/a").status_code == 200
        assert client.post(PATH, json={"name": "a"}).status_code == 201
