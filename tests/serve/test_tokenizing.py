"""Tokens of texts over HTTP, in the words of vLLM and of llama.cpp, and the list of models for clients of Anthropic."""

import pytest

from kvcellar import Engine
from kvcellar.serve import Server, ServeSettings
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import CONTEXT, PATIENCE
from tests.serve.wire import MODEL


def test_a_prompt_is_tokenized_as_vllm_does(http):
    found = http.post("/tokenize", json={"model": MODEL, "prompt": "abc"}).json()
    assert found == {"count": 4, "max_model_len": CONTEXT, "tokens": [1, 97, 98, 99], "token_strs": None}
    body = {"prompt": "abc", "add_special_tokens": False, "return_token_strs": True}
    found = http.post("/tokenize", json=body).json()
    assert (found["tokens"], found["token_strs"]) == ([97, 98, 99], ["a", "b", "c"])


def test_a_chat_is_tokenized_as_it_would_be_sent(http, engine):
    messages = [{"role": "user", "content": "hi"}]
    body = {"messages": messages, "add_generation_prompt": False, "chat_template_kwargs": {"a": 1}}
    found = http.post("/tokenize", json=body).json()
    assert bytes(found["tokens"]) == b"<user>hi"
    assert engine.rendered == [{"variables": {"a": 1}, "effort": None, "add_generation_prompt": False}]


def test_a_content_is_tokenized_as_llama_cpp_does(http):
    assert http.post("/tokenize", json={"content": "ab"}).json() == {"tokens": [97, 98]}
    assert http.post("/tokenize", json={"content": "ab", "add_special": True}).json() == {"tokens": [1, 97, 98]}
    found = http.post("/tokenize", json={"content": "é", "with_pieces": True}).json()
    assert found == {"tokens": [{"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]}


def test_tokens_become_a_text_under_both_names(http):
    assert http.post("/detokenize", json={"tokens": [104, 105]}).json() == {"prompt": "hi", "content": "hi"}
    assert http.post("/detokenize", json={"tokens": []}).json() == {"prompt": "", "content": ""}


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "a"}, 400, "prompt"),
        ("/tokenize", {"prompt": 1}, 400, "prompt"),
        ("/tokenize", {"content": "a", "parse_special": False}, 400, "parse_special"),
        ("/tokenize", {"prompt": "a", "unheard": 1}, 400, "unheard"),
        ("/tokenize", {"prompt": "a" * (2 * CONTEXT + 1)}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "model": "other"}, 404, "model"),
        ("/detokenize", {}, 400, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, 400, "tokens[0]"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(http, path, body, status, param):
    answer = http.post(path, json=body)
    assert answer.status_code == status
    assert answer.json()["error"]["param"] == param


def test_the_tokenizer_is_described(http):
    found = http.get("/tokenizer_info", params={"model": MODEL}).json()
    assert found == http.get("/tokenizer_info").json()
    assert (found["model"], found["max_model_len"], found["bos_token"]) == (MODEL, CONTEXT, "\x01")
    assert (found["eos_token"], found["chat_template"]) == (None, "{{ messages }}")
    assert http.get("/tokenizer_info", params={"model": "other"}).status_code == 404


def test_text_and_tokens_of_a_real_model_agree():
    with Engine(threads=1, cache_bytes=20_000_000) as engine, Server(engine, ServeSettings(port=0)) as server:
        with DeclaredClient(base_url=server.url, timeout=PATIENCE) as http:
            text = "def main():\n    print('café 東京')\n"
            tokens = http.post("/tokenize", json={"prompt": text}).json()["tokens"]
            assert tokens == engine.encode(text, special=True)
            assert http.post("/detokenize", json={"tokens": tokens}).json()["prompt"] == text
            pieces = http.post("/tokenize", json={"content": text, "with_pieces": True}).json()["tokens"]
            raw = b"".join(
                piece["piece"].encode() if isinstance(piece["piece"], str) else bytes(piece["piece"])
                for piece in pieces
            )
            assert raw.decode() == text
            found = http.get("/tokenizer_info").json()
            assert found["bos_token"] == "<|bos|>"
            assert "messages" in found["chat_template"]


def test_the_list_of_models_has_the_fields_of_anthropic(http):
    listed = http.get("/v1/models").json()
    assert (listed["object"], listed["has_more"], listed["first_id"], listed["last_id"]) == (
        "list",
        False,
        MODEL,
        MODEL,
    )
    (model,) = listed["data"]
    assert (model["type"], model["display_name"], model["object"]) == ("model", MODEL, "model")
    assert model["created_at"].endswith("Z")
    assert http.get(f"/v1/models/{MODEL}").json() == model
