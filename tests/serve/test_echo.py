"""Prompts in front of completions, and their log-probabilities: what harnesses for evaluation read."""

from collections.abc import Iterator

import httpx
import openai
import pytest

from kvcellar import Engine
from kvcellar.serve import Server, ServeSettings
from tests.engine.mixes import assert_at_rest
from tests.serve.fake_engine import PATIENCE

PROMPT = "def add(a, b):\n    return a + b\n# naïve café, 東京\n"
OTHER = "import os"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(dtype="float32", device="cpu", cache_bytes=64_000_000, max_sequences=16, threads=1) as engine:
        yield engine
        assert_at_rest(engine)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[Server]:
    with Server(engine, ServeSettings(port=0)) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as client:
        yield client


def post(server, path, **body):
    return httpx.post(f"{server.url}{path}", json=body, timeout=PATIENCE)


def scores_of(engine, prompt, most):
    return engine.generate(prompt, max_tokens=0, prompt_logprobs=most).prompt_logprobs


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_prompt_and_completion_are_one_text_with_one_list_of_tokens(client, engine, stream, n):
    body = {"model": engine.model.name, "prompt": [PROMPT, OTHER], "max_tokens": 4, "temperature": 0, "n": n}
    plain = client.completions.create(**body, logprobs=2)
    asked = client.completions.create(**body, logprobs=2, echo=True, stream=stream)
    found = {index: {"text": "", "tokens": [], "logprobs": [], "top": [], "offsets": []} for index in range(2 * n)}
    for part in asked if stream else [asked]:
        for choice in part.choices:
            into = found[choice.index]
            into["text"] += choice.text
            if (lists := choice.logprobs) is not None:
                into["tokens"] += lists.tokens
                into["logprobs"] += lists.token_logprobs
                into["top"] += lists.top_logprobs
                into["offsets"] += lists.text_offset
    for choice in plain.choices:
        prompt, whole = (PROMPT, OTHER)[choice.index // n], found[choice.index]
        own, after = scores_of(engine, prompt, 2), choice.logprobs
        assert whole["text"] == prompt + choice.text
        assert len(whole["tokens"]) == len(own) + len(after.tokens)
        assert whole["logprobs"][0] is None
        scores = [*(entry.logprob for entry in own[1:]), *after.token_logprobs]
        assert whole["logprobs"][1:] == pytest.approx(scores, abs=1e-4)
        assert whole["top"][0] is None
        assert [*map(len, whole["top"][len(own) :])] == [*map(len, after.top_logprobs)]
        assert whole["offsets"][len(own) :] == [len(prompt) + at for at in after.text_offset]
        for at, entry in enumerate(own[1:], start=1):
            assert (whole["logprobs"][at] == max(whole["top"][at].values())) == (entry.rank == 1)
        ends = [*whole["offsets"][1:], len(whole["text"])]
        for token, start, end in zip(whole["tokens"], whole["offsets"], ends, strict=True):
            assert token == whole["text"][start:end] or token.startswith("bytes:")


def test_a_harness_scores_the_continuations_of_contexts(server, engine):
    """As lm-eval does: several prompts as ids, one token behind them, sliced without the first and the last."""
    contexts, continuations = ["The sky is", "import"], [" blue.", " numpy as np"]
    prompts = [
        engine.encode(context + rest, special=False) for context, rest in zip(contexts, continuations, strict=True)
    ]
    body = {"prompt": prompts, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, "temperature": 0}
    choices = post(server, "/v1/completions", **body).json()["choices"]
    for prompt, choice in zip(prompts, choices, strict=True):
        own, cut = scores_of(engine, prompt, 1), len(prompt) // 2
        found = choice["logprobs"]["token_logprobs"][cut:-1]
        assert found == pytest.approx([entry.logprob for entry in own[cut:]], abs=1e-4)
        tops = choice["logprobs"]["top_logprobs"][cut:-1]
        greedy = [score == max(top.values()) for score, top in zip(found, tops, strict=True)]
        assert greedy == [entry.rank == 1 for entry in own[cut:]]
        assert choice["text"].startswith(engine.decode(prompt))


@pytest.mark.parametrize("stream", [False, True])
def test_nothing_may_follow_the_prompt(client, engine, stream):
    body = {"model": engine.model.name, "prompt": OTHER, "max_tokens": 0, "echo": True, "stream": stream}
    for logprobs in (None, 0):
        asked = client.completions.create(**body, **({} if logprobs is None else {"logprobs": logprobs}))
        choices = [choice for part in (asked if stream else [asked]) for choice in part.choices]
        assert "".join(choice.text for choice in choices) == OTHER
        assert choices[-1].finish_reason == "length"
        assert (choices[0].logprobs is None) == (logprobs is None)


def test_echo_without_log_probabilities_uses_the_cache(client, engine):
    body = {"model": engine.model.name, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    plain = client.completions.create(**body)
    echoed = client.completions.create(**body, echo=True)
    assert echoed.choices[0].text == PROMPT + plain.choices[0].text
    assert echoed.usage.prompt_tokens_details.cached_tokens == echoed.usage.prompt_tokens - 1
    assert client.completions.create(**body, echo=True, logprobs=0).usage.prompt_tokens_details.cached_tokens == 0


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_prompt_logprobs_are_returned_as_vllm_does(server, engine, route):
    asked = {"messages": [{"role": "user", "content": OTHER}]} if "chat" in route else {"prompt": OTHER}
    found = post(server, route, **asked, max_tokens=1, prompt_logprobs=2).json()
    prompt = engine.render(asked["messages"]) if "chat" in route else engine.encode(OTHER)
    entries = (found if "chat" in route else found["choices"][0])["prompt_logprobs"]
    own = scores_of(engine, prompt, 2)
    assert entries[0] is None
    assert len(entries) == len(own)
    for entry, expected in zip(entries[1:], own[1:], strict=True):
        mine = entry[str(expected.token_id)]
        assert mine["rank"] == expected.rank
        assert mine["logprob"] == pytest.approx(expected.logprob, abs=1e-4)
        found_top = [entry[str(token)]["logprob"] for token, _ in expected.top]
        assert found_top == pytest.approx([value for _, value in expected.top], abs=1e-4)
        assert sorted(one["rank"] for one in entry.values())[:2] == [1, 2]


def test_an_echo_without_log_probabilities_has_none_beside_those_of_the_prompt(server):
    asked = {"prompt": OTHER, "max_tokens": 1, "echo": True, "prompt_logprobs": 1}
    (choice,) = post(server, "/v1/completions", **asked).json()["choices"]
    assert choice["text"].startswith(OTHER)
    assert choice["prompt_logprobs"][0] is None
    assert choice.get("logprobs") is None


def test_a_streamed_echo_that_only_scores_has_no_log_probabilities_that_were_not_asked_for(client, engine):
    body = {"model": engine.model.name, "prompt": OTHER, "max_tokens": 0, "temperature": 0}
    parts = [*client.completions.create(**body, echo=True, stream=True)]
    choices = [choice for part in parts for choice in part.choices]
    assert "".join(choice.text for choice in choices) == OTHER
    assert all(choice.logprobs is None for choice in choices)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": 1}, "echo"),
        ({"echo": True, "conversation": "c"}, "echo"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        ({"suffix": "end"}, "suffix"),
        ({"echo": True, "prompt": [10**9]}, "prompt"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(server, body, param):
    answer = post(server, "/v1/completions", **{"prompt": OTHER} | body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
