"""OpenAI's package, the server, the real engine and the embedded model: completions equal those of the engine, and a
disconnect frees all cells."""

import time
from collections.abc import Iterator

import httpx
import openai
import pytest

from kvcellar import Engine
from kvcellar.serve import Server, ServeSettings, key_digest
from tests.engine.mixes import assert_at_rest
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import PATIENCE

ASKED = [{"role": "user", "content": "Write a function that adds two numbers."}]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(dtype="float32", device="cpu", cache_bytes=64_000_000, max_sequences=16, threads=1) as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with Server(engine, ServeSettings(port=0, admin_digests=(key_digest("operator"),))) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with DeclaredClient(base_url=server.url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture(autouse=True)
def at_rest(engine: Engine) -> Iterator[None]:
    """After a test all cells are freed; a cancellation takes effect between two steps."""
    yield
    until = time.monotonic() + PATIENCE
    while (stats := engine.stats()).running + stats.waiting + stats.cells_used and time.monotonic() < until:
        time.sleep(0.01)
    assert_at_rest(engine)


def test_the_model_is_listed(client, engine):
    assert [model.id for model in client.models.list()] == [engine.model.name]


def test_a_continued_response_finds_its_conversation_in_memory(client, engine, http):
    """And its usage is that of the record of the request."""
    model, asked = engine.model.name, ASKED[0]["content"]
    first = client.responses.create(model=model, input=asked, max_output_tokens=12, temperature=0)
    second = client.responses.create(
        model=model, input="Another one.", max_output_tokens=12, temperature=0, previous_response_id=first.id
    )
    whole = [*ASKED, {"role": "assistant", "content": first.output_text}, {"role": "user", "content": "Another one."}]
    chat = client.chat.completions.create(model=model, messages=whole, max_tokens=12, temperature=0)
    assert second.output_text == chat.choices[0].message.content
    assert second.usage.input_tokens == chat.usage.prompt_tokens
    # all but the last generated token is in memory when the second request begins
    computed = first.usage.total_tokens - 1
    record = http.get(f"/admin/requests/{second.id}", headers={"authorization": "Bearer operator"}).json()
    assert record["cached_tokens"] == second.usage.input_tokens_details.cached_tokens == computed
    assert record["completion_tokens"] == second.usage.output_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_completion_equals_the_engines(client, engine, stream):
    own = engine.generate("def main():", max_tokens=24, temperature=0.0)
    engine.clear_cache()
    body = {"model": engine.model.name, "prompt": "def main():", "max_tokens": 24, "temperature": 0, "stream": stream}
    if stream:
        parts = list(client.completions.create(**body, stream_options={"include_usage": True}))
        text, usage = "".join(part.choices[0].text for part in parts if part.choices), parts[-1].usage
    else:
        response = client.completions.create(**body)
        text, usage = response.choices[0].text, response.usage
    assert text == own.text
    assert usage.prompt_tokens == own.usage.prompt_tokens == len(engine.encode("def main():"))
    assert usage.completion_tokens == own.usage.completion_tokens
    assert usage.prompt_tokens_details.cached_tokens == own.usage.cached_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_chat_completion_equals_the_engines(client, engine, stream):
    own = engine.chat(ASKED, max_tokens=24, temperature=0.0)
    body = {"model": engine.model.name, "messages": ASKED, "max_completion_tokens": 24, "temperature": 0}
    if stream:
        parts = list(client.chat.completions.create(**body, stream=True))
        text = "".join(part.choices[0].delta.content or "" for part in parts)
        reason = parts[-1].choices[0].finish_reason
    else:
        (choice,) = client.chat.completions.create(**body).choices
        text, reason = choice.message.content, choice.finish_reason
    assert (text, reason) == (own.text, own.finish_reason)


def test_text_and_token_id_prompts_give_the_same_completions(client, engine):
    texts = ["import os", "class Dog:", "for x in"]
    body = {"model": engine.model.name, "max_tokens": 8, "temperature": 0}
    by_text = client.completions.create(prompt=texts, **body)
    by_ids = client.completions.create(prompt=[engine.encode(text) for text in texts], **body)
    own = engine.generate(texts, max_tokens=8, temperature=0.0)
    assert [c.text for c in by_text.choices] == [c.text for c in by_ids.choices] == [result.text for result in own]
    assert by_text.usage.total_tokens == sum(len(engine.encode(text)) for text in texts) + 24


def test_choices_differ_and_a_seed_reproduces_them(client, engine):
    body = {"model": engine.model.name, "prompt": "def ", "max_tokens": 12, "temperature": 1.0, "n": 4, "seed": 5}
    first, second = (client.completions.create(**body) for _ in range(2))
    texts = [choice.text for choice in first.choices]
    assert texts == [choice.text for choice in second.choices]
    assert len(set(texts)) > 1


def test_logprobs_belong_to_the_sampled_tokens(client, engine):
    body = {"model": engine.model.name, "max_tokens": 10, "temperature": 0}
    (choice,) = client.completions.create(prompt="def main():", logprobs=3, **body).choices
    assert "".join(choice.logprobs.tokens) == choice.text
    assert [choice.text[at:] for at in choice.logprobs.text_offset] == [
        "".join(choice.logprobs.tokens[i:]) for i in range(10)
    ]
    for token, logprob, top in zip(
        choice.logprobs.tokens, choice.logprobs.token_logprobs, choice.logprobs.top_logprobs, strict=True
    ):
        assert logprob <= 0
        assert max(top, key=top.__getitem__) == token
        assert top[token] == logprob
    (choice,) = client.chat.completions.create(messages=ASKED, logprobs=True, top_logprobs=2, **body).choices
    assert "".join(entry.token for entry in choice.logprobs.content).startswith(choice.message.content)
    assert all(entry.top_logprobs[0].logprob == entry.logprob for entry in choice.logprobs.content)


def test_a_stop_string_ends_the_completion(client, engine):
    whole = engine.generate("def main():", max_tokens=24, temperature=0.0).text
    stop = whole[len(whole) // 2 :][:3]
    body = {"model": engine.model.name, "prompt": "def main():", "max_tokens": 24, "temperature": 0}
    (choice,) = client.completions.create(stop=stop, **body).choices
    assert choice.text == whole[: whole.index(stop)]
    assert (choice.finish_reason, choice.model_extra["stop_reason"]) == ("stop", stop)


def test_disconnect_during_a_stream_frees_every_cell(client, engine):
    body = {"model": engine.model.name, "prompt": "def main():", "max_tokens": 3000}
    with client.completions.create(stream=True, n=3, extra_body={"ignore_eos": True}, **body) as stream:
        for _, _part in zip(range(5), stream, strict=False):
            pass
        assert engine.stats().cells_used > 0


def test_a_closed_engine_is_not_healthy(engine):
    with Engine(device="cpu", cache_bytes=8_000_000, max_sequences=2, threads=1) as other:
        with Server(other, ServeSettings(port=0)) as server:
            assert httpx.get(f"{server.url}/health").status_code == 200
            other.close()
            assert httpx.get(f"{server.url}/health").status_code == 503
            response = httpx.post(f"{server.url}/v1/completions", json={"prompt": "x"})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "shutting_down")


@pytest.mark.parametrize(
    "prompt", [" ", "\n" * 50, "\t \r\n", "\x00", "\u2028", "<|bos|>", "<|bos|><|eos|><|pad|>", "<|none|>"]
)
def test_prompts_of_whitespace_and_control_tokens_are_completed(client, engine, prompt):
    response = client.completions.create(model="embedded", prompt=prompt, max_tokens=3)
    assert response.usage.prompt_tokens == len(engine.encode(prompt))
    assert response.choices[0].finish_reason in ("length", "stop")


@pytest.mark.parametrize("over", [0, 1, 100])
def test_a_prompt_at_the_limit_of_the_context(client, engine, over):
    prompt = [5] * (engine.model.context + over)
    if over:
        with pytest.raises(openai.BadRequestError, match=f"{len(prompt)} tokens"):
            client.completions.create(model="embedded", prompt=prompt, max_tokens=1)
    else:
        response = client.completions.create(model="embedded", prompt=prompt, max_tokens=9)
        assert (response.choices[0].finish_reason, response.usage.completion_tokens) == ("length", 1)
