"""Vectors of texts over HTTP, by OpenAI's package and with the bodies of Ollama's clients."""

import base64
import math
import struct
from collections.abc import Iterator

import httpx
import openai
import pytest

from kvcellar import Engine
from kvcellar.engine.core.prompt_rows import PromptRows
from kvcellar.serve import Server, ServeSettings
from kvcellar.serve.openai import embeddings
from tests.engine.embedding_models import saved
from tests.engine.mixes import assert_at_rest
from tests.serve.fake_engine import PATIENCE

TEXTS = ["the cat sat on the mat", "a dog", "the cat sat on a chair"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("models") / "m"
    saved(folder, normalised=False, matryoshka_dimensions=[8])
    with Engine(folder, threads=1, cache_bytes=20_000_000) as engine:
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


def own(engine, inputs, **how):
    return [[*one.vector] for one in engine.embeddings.of(inputs, **how)]


def near(found, wanted):
    assert len(found) == len(wanted)
    return all(one == pytest.approx(other, abs=1e-4) for one, other in zip(found, wanted, strict=True))


def unit(vector):
    return [value / math.hypot(*vector) for value in vector]


def test_openais_package_reads_base64_in_order(client, engine):
    found = client.embeddings.create(model=engine.model.name, input=TEXTS)  # it asks for base64 itself
    assert [one.index for one in found.data] == [0, 1, 2]
    assert near([one.embedding for one in found.data], own(engine, TEXTS))
    assert found.usage.prompt_tokens == found.usage.total_tokens == sum(len(engine.encode(text)) for text in TEXTS)


def test_both_encodings_are_the_same_numbers(server, engine):
    bodies = [post(server, "/v1/embeddings", input="a dog", encoding_format=one).json() for one in ("float", "base64")]
    floats, encoded = (body["data"][0]["embedding"] for body in bodies)
    raw = base64.b64decode(encoded)
    assert list(struct.unpack(f"<{len(raw) // 4}f", raw)) == pytest.approx(floats)
    assert bodies[1]["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_inputs_may_be_ids(client, engine):
    ids = [engine.encode(text) for text in TEXTS]
    for given in (ids, ids[0]):
        found = client.embeddings.create(model=engine.model.name, input=given)
        assert near([one.embedding for one in found.data], own(engine, TEXTS)[: len(found.data)])


def test_more_inputs_than_a_group_keep_their_order(server, engine, monkeypatch):
    monkeypatch.setattr(embeddings, "GROUP", 2)
    inputs = [f"text {number}" for number in range(7)]
    found = [one["embedding"] for one in post(server, "/v1/embeddings", input=inputs).json()["data"]]
    assert near(found, own(engine, inputs))


def test_dimensions_of_a_model_that_declares_them(client, engine):
    found = client.embeddings.create(model=engine.model.name, input="a dog", dimensions=8).data[0].embedding
    assert near([found], own(engine, ["a dog"], dimensions=8))
    with pytest.raises(openai.BadRequestError, match="dimensions cannot be 7"):
        client.embeddings.create(model=engine.model.name, input="a dog", dimensions=7)


def test_ollamas_routes_return_unit_vectors_and_the_older_one_what_was_pooled(server, engine):
    name, raw = engine.model.name, own(engine, TEXTS)
    found = post(server, "/api/embed", model=name, input=TEXTS, options={}, keep_alive="5m").json()
    assert near(found["embeddings"], list(map(unit, raw)))
    assert found["prompt_eval_count"] == sum(len(engine.encode(text)) for text in TEXTS)
    assert found["total_duration"] > 0
    assert post(server, "/api/embed", model=name, input="").json()["embeddings"] == []
    assert near([post(server, "/api/embeddings", model=name, prompt=TEXTS[0]).json()["embedding"]], raw[:1])
    assert post(server, "/api/embeddings", model=name, prompt="").json() == {"embedding": []}


def test_ollamas_bodies_name_the_model_by_the_field_that_chooses_it(server, engine):
    for path, given in (("/api/embed", {"input": "a"}), ("/api/embeddings", {"prompt": "a"})):
        for name in ({}, {"name": engine.model.name}):
            answer = post(server, path, **given, **name)
            assert (answer.status_code, answer.json()) == (400, {"error": "model is required"})


def test_ollama_truncates_unless_told_not_to(server, engine):
    text = "a " * 400
    found = post(server, "/api/embed", model=engine.model.name, input=text)
    assert found.json()["prompt_eval_count"] == engine.model.context
    for path, body in (("/api/embed", {"truncate": False}), ("/v1/embeddings", {})):
        assert post(server, path, model=engine.model.name, input=text, **body).status_code == 400


def test_other_models_do_not_embed():
    with Engine(threads=1, cache_bytes=20_000_000) as engine, Server(engine, ServeSettings(port=0)) as server:
        answer = post(server, "/v1/embeddings", input="a").json()["error"]
        assert answer["message"].startswith("model does not do embeddings: ")
        assert answer["param"] == "model"
        assert post(server, "/api/embed", model=engine.model.name, input="a").status_code == 400


def test_an_embedding_that_is_no_numbers_is_an_error_in_every_encoding(server, engine, monkeypatch):
    """JSON has no NaN, and nothing is near to it in base64."""
    real = PromptRows.values
    monkeypatch.setattr(PromptRows, "values", lambda self, logits, hidden: real(self, logits, hidden * math.nan))
    for encoding in ("float", "base64"):
        answer = post(server, "/v1/embeddings", input="a dog", encoding_format=encoding)
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "scores_not_numbers")
        assert "that were pooled hold NaN" in answer.json()["error"]["message"]
    for path, given in (("/api/embed", {"input": "a"}), ("/api/embeddings", {"prompt": "a"})):
        answer = post(server, path, model=engine.model.name, **given)
        assert answer.status_code == 500
        assert "that were pooled hold NaN" in answer.json()["error"]
