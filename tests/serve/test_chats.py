"""A chat over HTTP reads only what is new in each turn, though a tokenizer would give its replies other tokens."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from kvcellar import Engine
from kvcellar.serve import Server, ServeSettings, key_digest
from tests.engine.chatting import chat_engine, unspoken
from tests.serve.fake_engine import PATIENCE
from tests.text.templates import THINKER

KEYS = ("one-key-of-the-server", "another-key-of-the-server")
Messages = list[dict[str, Any]]


@contextmanager
def client_of(engine: Engine) -> Iterator[openai.OpenAI]:
    with Server(engine, ServeSettings(port=0, key_digests=tuple(map(key_digest, KEYS)))) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0, timeout=PATIENCE) as client:
            yield client


def ask(client: openai.OpenAI, messages: Messages, suppressed: list[int], *, seed: int = 0, **fields: Any):
    """The usage and the text of a reply, whose tokens are drawn nearly uniformly."""
    body = {"suppress_tokens": suppressed, "ignore_eos": True, "return_recall": True, **fields}
    answer = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=messages,  # pyright: ignore[reportArgumentType]
        max_tokens=12,
        temperature=2,
        seed=seed,
        extra_body=body,
    )
    return answer.usage, answer.choices[0].message.content


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **more}


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])  # full, sliding, hybrid
def test_each_of_ten_turns_reads_only_what_is_new(name: str, tmp_path: Path) -> None:
    with chat_engine(tmp_path, name) as engine, client_of(engine) as client:
        suppressed, messages, known, other = unspoken(engine), [user("Who are you?")], 0, 0
        for turn in range(10):
            usage, text = ask(client, messages, suppressed, seed=turn)
            assert usage.prompt_tokens_details.cached_tokens == max(0, known - 1), "the last token was not computed"
            known = usage.prompt_tokens + usage.completion_tokens
            messages += [assistant(text), user(f"And {turn}?")]
            other += engine.render(messages, replay=False) != engine.render(messages)
            assert engine.decode(engine.render(messages)) == engine.decode(engine.render(messages, replay=False))
        engine.check()


def test_a_request_can_have_its_replies_tokenized_again(tmp_path: Path) -> None:
    with chat_engine(tmp_path, "llama") as engine, client_of(engine) as client:
        suppressed, messages = unspoken(engine), [user("Who are you?")]
        usage, text = ask(client, messages, suppressed)
        known = usage.prompt_tokens + usage.completion_tokens - 1
        messages += [assistant(text), user("And you?")]
        again, _ = ask(client, messages, suppressed, replay_tokens=False)
        assert again.prompt_tokens_details.cached_tokens < known
        exact, _ = ask(client, messages, suppressed)
        assert exact.prompt_tokens_details.cached_tokens == known
        url, headers = str(client.base_url.join("/tokenize")), {"authorization": f"Bearer {KEYS[0]}"}
        bodies: Any = ({"messages": messages}, {"messages": messages, "replay_tokens": True})
        plain, ours = (httpx.post(url, json=body, headers=headers).json()["tokens"] for body in bodies)
        assert len(ours) == exact.prompt_tokens
        assert plain != ours
        assert engine.decode(plain) == engine.decode(ours)


def test_replies_to_other_keys_and_users_are_not_replayed(tmp_path: Path) -> None:
    with chat_engine(tmp_path, "llama") as engine, client_of(engine) as client:
        suppressed, messages = unspoken(engine), [user("Who are you?")]
        usage, text = ask(client, messages, suppressed)
        messages += [assistant(text), user("And you?")]
        whole = usage.prompt_tokens + usage.completion_tokens
        stranger = client.with_options(api_key=KEYS[1])
        others: list[tuple[openai.OpenAI, dict[str, Any]]] = [(stranger, {}), (client, {"user": "a"})]
        counts = [ask(one, messages, suppressed, **fields)[0] for one, fields in others]
        assert len({usage.prompt_tokens for usage in counts}) == 1
        own, _ = ask(client, messages, suppressed)
        assert own.prompt_tokens_details.cached_tokens == whole - 1
        assert own.prompt_tokens != counts[0].prompt_tokens, "the tokens of the reply are not the tokenizer's"


def test_the_record_says_which_message_a_template_has_rewritten(tmp_path: Path) -> None:
    with chat_engine(tmp_path, "llama", template=THINKER) as engine, client_of(engine) as client:
        suppressed = unspoken(engine)
        call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        messages: Messages = [
            user("Where is it?"),
            assistant("", reasoning_content="It may be in the cellar, or it is not.", tool_calls=[call]),
            {"role": "tool", "tool_call_id": "c1", "content": "in the cellar"},
        ]
        usage, text = ask(client, messages, suppressed)
        assert usage.recall[0]["rewrite"] is None
        kept, _ = ask(client, [*messages, assistant(text)], suppressed, add_generation_prompt=False)
        assert kept.recall[0]["rewrite"] is None
        messages += [assistant(text), user("Thanks.")]
        last, _ = ask(client, messages, suppressed)
        recall, cached = last.recall[0], last.prompt_tokens_details.cached_tokens
        lost = usage.prompt_tokens + usage.completion_tokens - cached
        assert recall["rewrite"] == {"message": 1, "role": "assistant", "by": "template", "tokens": lost}
        assert (
            f"the chat template renders messages[1] (assistant) in another form than before, so {lost}"
            in recall["detail"]
        )


def test_64_clients_read_the_system_prompt_of_their_chats_once(tmp_path: Path) -> None:
    draw = random.Random(0)
    system = {"role": "system", "content": " ".join(draw.choice(("cellar", "forgotten", "naive")) for _ in range(600))}
    with chat_engine(tmp_path, "llama") as engine, client_of(engine) as client, ThreadPoolExecutor(64) as pool:
        suppressed = unspoken(engine)
        common = len(engine.render([system], add_generation_prompt=False))
        assert common >= 1500
        questions = [[system, user(f"{number}?")] for number in range(64)]
        usages = [usage for usage, _ in pool.map(lambda messages: ask(client, messages, suppressed), questions)]
    prompts = sum(usage.prompt_tokens for usage in usages)
    read = prompts - sum(usage.prompt_tokens_details.cached_tokens for usage in usages)
    assert read <= prompts - 63 * common


def test_replies_keep_their_tokens_after_a_restart(tmp_path: Path) -> None:
    messages, known = [user("Who are you, and where is the cellar? " * 3)], 0
    for turn in range(3):
        with (
            chat_engine(tmp_path / "model", "llama", store=str(tmp_path / "store")) as engine,
            client_of(engine) as client,
        ):
            usage, text = ask(client, messages, unspoken(engine), seed=turn)
            assert usage.prompt_tokens_details.cached_tokens == max(0, known - 1)
            known = usage.prompt_tokens + usage.completion_tokens
            messages += [assistant(text), user("And then? " * 20)]
