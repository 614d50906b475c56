"""OpenAI's package, sync and async, with the server: results and exceptions."""

import asyncio
import threading

import openai
import openai.types.chat.completion_create_params
import openai.types.completion_create_params
import pytest

from kvcellar.errors import CacheFull, EngineFailed, Overloaded
from kvcellar.serve import Server, ServeSettings, key_digest
from kvcellar.serve.generation.ignored_fields import NEUTRAL, NO_EFFECT
from kvcellar.serve.openai.chat import ChatBody
from kvcellar.serve.openai.completions import CompletionBody
from kvcellar.serve.openai.fields import SAMPLING
from tests.serve.fake_engine import PATIENCE, FakeEngine, FakeModel
from tests.serve.wire import MODEL

ASKED = [{"role": "user", "content": "hi"}]
SAID = "<user>hi"


@pytest.fixture(scope="module")
def shared_client(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def client(shared_client, engine):
    return shared_client


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "kvcellar"


def test_completion(client, engine):
    with engine.scripted(cached=2):
        response = client.completions.create(model=MODEL, prompt="hello", seed=7, temperature=0.5)
    assert (response.choices[0].text, response.choices[0].finish_reason, response.object) == (
        "hello",
        "stop",
        "text_completion",
    )
    assert response.usage.prompt_tokens_details.cached_tokens == 2
    assert response._request_id.startswith("req-")
    ((_, params),) = engine.seen
    assert (params.seed, params.temperature, params.max_tokens) == (7, 0.5, 16)


def test_chat(client, engine):
    response = client.chat.completions.create(model=MODEL, messages=ASKED, max_completion_tokens=4, n=2)
    assert [choice.message.content for choice in response.choices] == [SAID[:4], SAID[1:5]]
    assert [choice.finish_reason for choice in response.choices] == ["length", "length"]
    assert response.usage.total_tokens == response.usage.prompt_tokens + 8
    assert response.usage.prompt_tokens_details.cached_tokens == 0


def test_every_parameter_reaches_the_engine(client, engine):
    client.chat.completions.create(
        model=MODEL,
        messages=ASKED,
        max_tokens=9,
        temperature=0.1,
        top_p=0.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={"65": -5},
        seed=11,
        n=2,
        stop=["a", "b"],
        logprobs=True,
        top_logprobs=3,
        extra_body={
            "top_k": 12,
            "min_p": 0.5,
            "typical_p": 0.6,
            "repetition_penalty": 1.1,
            "min_tokens": 2,
            "ignore_eos": True,
            "stop_token_ids": [7],
        },
    )
    ((_, params),) = engine.seen
    assert params == type(params)(
        max_tokens=9,
        temperature=0.1,
        top_p=0.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        logit_bias={65: -5.0},
        seed=11,
        n=2,
        stop=("a", "b"),
        logprobs=3,
        top_k=12,
        min_p=0.5,
        typical_p=0.6,
        repetition_penalty=1.1,
        min_tokens=2,
        ignore_eos=True,
        stop_token_ids=(7,),
    )


def test_stream_of_a_chat_with_usage(client):
    chunks = list(
        client.chat.completions.create(model=MODEL, messages=ASKED, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == SAID
    assert [chunk.choices[0].delta.role for chunk in chunks if chunk.choices] == ["assistant"] + [None] * 9
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * 10
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len(SAID)
    assert chunks[-2].choices[0].finish_reason == "stop"


def test_the_packages_own_accumulation_of_a_stream(client):
    with client.chat.completions.stream(model=MODEL, messages=ASKED, n=2, logprobs=True, top_logprobs=1) as stream:
        response = stream.get_final_completion()
    assert [choice.message.content for choice in response.choices] == [SAID, SAID[1:] + SAID[0]]
    assert len(response.choices[1].logprobs.content) == len(SAID)


def test_stream_of_a_completion_for_several_prompts(client):
    texts = {}
    for chunk in client.completions.create(model=MODEL, prompt=["one", "two"], stream=True):
        texts[chunk.choices[0].index] = texts.get(chunk.choices[0].index, "") + chunk.choices[0].text
    assert texts == {0: "one", 1: "two"}


def test_logprobs(client):
    found = client.completions.create(model=MODEL, prompt="ab", logprobs=2).choices[0].logprobs
    assert (found.tokens, found.text_offset, found.token_logprobs) == (["a", "b"], [0, 1], [-0.125, -0.25])
    found = (
        client.chat.completions.create(model=MODEL, messages=ASKED, logprobs=True, top_logprobs=2).choices[0].logprobs
    )
    assert "".join(entry.token for entry in found.content) == SAID
    assert b"".join(bytes(entry.bytes) for entry in found.content) == SAID.encode()
    assert {len(entry.top_logprobs) for entry in found.content} == {2}


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        (openai.types.chat.completion_create_params.CompletionCreateParamsBase, ChatBody),
        (openai.types.completion_create_params.CompletionCreateParamsBase, CompletionBody),
    ],
)
def test_every_field_of_the_package_is_handled(sent, body):
    unknown = set(sent.__annotations__) - set(body.model_fields) - set(SAMPLING) - set(NEUTRAL) - set(NO_EFFECT)
    assert not unknown, "each of these must be implemented, without effect, or refused by name"


def test_errors_raise_the_exceptions_of_the_package(client, engine):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model=MODEL, prompt="x", n=0)
    assert (refused.value.param, refused.value.type) == ("n", "invalid_request_error")
    with pytest.raises(openai.NotFoundError) as refused:
        client.chat.completions.create(model="gpt-4o", messages=ASKED)
    assert refused.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4o")
    with pytest.raises(openai.BadRequestError, match="does not do embeddings"):
        client.embeddings.create(model=MODEL, input="x", encoding_format="float")
    with pytest.raises(openai.BadRequestError, match="tools"):
        client.chat.completions.create(
            model=MODEL, messages=ASKED, tools=[{"type": "function", "function": {"name": "f"}}]
        )
    for error, status in ((Overloaded("full"), 503), (CacheFull("a", 2, 1), 503), (EngineFailed("x"), 500)):
        with engine.scripted(reject=error), pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(model=MODEL, prompt="x")
        assert refused.value.status_code == status


def test_the_client_retries_an_overloaded_server(client, engine):
    with engine.scripted(reject=Overloaded("full"), rejections=1):
        patient = client.with_options(max_retries=1)
        assert patient.completions.create(model=MODEL, prompt="x").choices[0].text == "x"


def test_an_error_within_a_stream_is_raised(client, engine):
    with engine.scripted(fail=EngineFailed("x"), fail_at=3):
        stream = client.completions.create(model=MODEL, prompt="hello", stream=True)
        texts = []
        with pytest.raises(openai.APIError) as failed:
            texts += [chunk.choices[0].text for chunk in stream]
    assert failed.value.code == "internal_error"


def test_closing_a_stream_cancels_the_request(client, engine):
    with engine.scripted(delay=0.01, output=b"x" * 2000):
        with client.completions.create(model=MODEL, prompt="hello", stream=True, max_tokens=2000) as stream:
            assert next(iter(stream)).choices[0].text == "x"
        assert engine.rest()
    assert engine.cancels == 1


def test_keys(shared_engine, engine):
    with Server(shared_engine, ServeSettings(port=0, key_digests=(key_digest("good"),))) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="good", max_retries=0) as client:
            assert client.models.retrieve(MODEL).id == MODEL
            with pytest.raises(openai.AuthenticationError) as refused:
                client.with_options(api_key="bad").models.list()
        assert refused.value.code == "invalid_api_key"


def test_another_host_is_refused(client):
    with pytest.raises(openai.PermissionDeniedError):
        client.models.list(extra_headers={"Host": "evil.com"})


def test_a_model_without_text_serves_token_ids():
    with (
        FakeEngine(FakeModel(has_text=False, has_chat=False)) as engine,
        Server(engine, ServeSettings(port=0)) as server,
    ):
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as client:
            response = client.completions.create(model=MODEL, prompt=[200, 201], logprobs=1)
            assert response.choices[0].model_extra["token_ids"] == [200, 201]
            assert response.choices[0].logprobs.tokens == ["token_id:200", "token_id:201"]
            with pytest.raises(openai.BadRequestError, match="token ids"):
                client.completions.create(model=MODEL, prompt="hello")
            with pytest.raises(openai.BadRequestError, match="chat template"):
                client.chat.completions.create(model=MODEL, messages=ASKED)


def async_client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE)


@pytest.mark.parametrize("name", ["gpt2", "owner/name", "a.b-c_1"])
def test_model_names_with_and_without_an_owner(name):
    with FakeEngine(FakeModel(name=name)) as engine, Server(engine, ServeSettings(port=0)) as server:
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0) as client:
            assert client.models.retrieve(name).id == name
            assert client.completions.create(model=name, prompt="x").model == name


def test_many_clients_at_once(server, engine):
    async def one(client, number):
        if number % 3 == 0:
            stream = await client.completions.create(model=MODEL, prompt=f"number {number}", stream=True)
            return "".join([chunk.choices[0].text async for chunk in stream])
        if number % 3 == 1:
            response = await client.completions.create(model=MODEL, prompt=f"number {number}")
            return response.choices[0].text
        messages = [{"role": "user", "content": f"number {number}"}]
        response = await client.chat.completions.create(model=MODEL, messages=messages)
        return response.choices[0].message.content.removeprefix("<user>")

    async def all_of_them():
        async with async_client(server) as client:
            assert [model.id async for model in client.models.list()] == [MODEL]
            with pytest.raises(openai.BadRequestError):
                await client.completions.create(model=MODEL, prompt="x", max_tokens=0)
            return await asyncio.gather(*(one(client, number) for number in range(60)))

    assert asyncio.run(all_of_them()) == [f"number {number}" for number in range(60)]


def test_cancelling_an_async_call_cancels_the_request(server, engine):
    gate = threading.Event()

    async def short_limits():
        async with async_client(server) as client:
            call = asyncio.create_task(client.completions.create(model=MODEL, prompt="x"))
            while not engine.running:
                await asyncio.sleep(0.01)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call

    with engine.scripted(gate=gate):
        asyncio.run(short_limits())
        assert engine.rest()
    assert engine.cancels == 1
