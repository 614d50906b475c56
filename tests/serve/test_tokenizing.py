"""Tokens of texts over HTTP, in the words of vLLM and of llama.cpp, and the list of models for clients of Anthropic."""

from collections.abc import Iterator

import httpx
import pytest
from transformers import AutoTokenizer

from kvcellar import Engine
from kvcellar.serve import Server, ServeSettings
from tests.serve.declared import DeclaredClient
from tests.serve.every_api import tiny_engine
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
    found = http.post("/detokenize", json={"tokens": [104, 0xC3, 0xA9], "with_pieces": True}).json()
    assert found == {"prompt": "hé", "content": "hé", "pieces": ["h", [0xC3], [0xA9]]}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with tiny_engine(tmp_path_factory.mktemp("tiny")) as engine:
        yield engine


@pytest.fixture(scope="module")
def tiny_http(tiny: Engine) -> Iterator[httpx.Client]:
    with Server(tiny, ServeSettings(port=0)) as server, DeclaredClient(base_url=server.url, timeout=PATIENCE) as http:
        yield http


TALK = [{"role": "user", "content": "Which hill?"}]
TOOL = {"type": "function", "function": {"name": "find", "parameters": {"type": "object"}, "description": "a hill"}}
CHATS: tuple[dict[str, object], ...] = (
    {},
    {"tools": [TOOL]},
    {"tools": [TOOL], "tool_choice": "none"},
    {"chat_template_kwargs": {"enable_thinking": False}},
    {"reasoning_effort": "none"},
    {"add_generation_prompt": False},
    {"messages": [*TALK, {"role": "assistant", "content": "The"}], "continue_final_message": True},
    {"messages": [*TALK, {"role": "assistant", "content": "The", "prefix": True}]},
)


@pytest.mark.parametrize("more", CHATS)
def test_a_chat_has_as_many_tokens_as_its_answer_counts(tiny_http, more):
    chat = {"messages": TALK, **more}
    found = tiny_http.post("/tokenize", json=chat).json()
    how = {"max_tokens": 1, "return_token_ids": True, "replay_tokens": False}
    told = tiny_http.post("/v1/chat/completions", json={**chat, **how}).json()
    assert (found["count"], found["tokens"]) == (told["usage"]["prompt_tokens"], told["prompt_token_ids"])


def test_tools_are_counted(tiny_http):
    plain, with_tools = (tiny_http.post("/tokenize", json={"messages": TALK, **more}).json() for more in CHATS[:2])
    assert with_tools["count"] > plain["count"]


@pytest.mark.parametrize("text", ["Don't ask why the naïve café owner said", "def f(x):\n\treturn 你好"])
def test_strings_of_tokens_are_entries_of_the_vocabulary(tiny, tiny_http, text):
    """As vLLM and transformers have them: parts of characters, too."""
    found = tiny_http.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    tokenizer = AutoTokenizer.from_pretrained(tiny.model.path)
    assert found["token_strs"] == tokenizer.convert_ids_to_tokens(found["tokens"])
    assert "\ufffd" not in "".join(found["token_strs"])
    chat = tiny_http.post("/tokenize", json={"messages": TALK, "return_token_strs": True}).json()
    assert chat["token_strs"] == tokenizer.convert_ids_to_tokens(chat["tokens"])


@pytest.mark.parametrize("form", [{"prompt": "hi"}, {"messages": TALK}])
def test_vllms_fields_may_have_values_that_change_nothing(http, form):
    neutral = {
        "add_generation_prompt": True, "continue_final_message": False, "chat_template": None, "tools": None,
        "chat_template_kwargs": None, "mm_processor_kwargs": None, "media_io_kwargs": None, "return_token_strs": False,
        "truncate_prompt_tokens": None, "documents": None, "add_special_tokens": "prompt" in form,
    }  # fmt: skip
    found = http.post("/tokenize", json={**form, **neutral})
    assert found.status_code == 200, found.text
    assert found.json() == http.post("/tokenize", json=form).json()


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        ("/tokenize", {}, 400, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "a"}, 400, "prompt"),
        ("/tokenize", {"prompt": 1}, 400, "prompt"),
        ("/tokenize", {"content": "a", "parse_special": False}, 400, "parse_special"),
        ("/tokenize", {"prompt": "a", "unheard": 1}, 400, "unheard"),
        ("/tokenize", {"prompt": "a", "mm_processor_kwargs": {"a": 1}}, 400, "mm_processor_kwargs"),
        ("/tokenize", {"messages": TALK, "chat_template": "{{ 1 }}"}, 400, "chat_template"),
        ("/tokenize", {"prompt": "a", "tools": [TOOL]}, 400, "tools"),
        ("/tokenize", {"content": "a", "continue_final_message": True}, 400, "continue_final_message"),
        ("/tokenize", {"prompt": "a", "replay_tokens": True}, 400, "replay_tokens"),
        ("/tokenize", {"messages": TALK, "add_special_tokens": True}, 400, "add_special_tokens"),
        ("/tokenize", {"messages": TALK, "continue_final_message": True}, 400, "messages"),
        ("/tokenize", {"messages": TALK, "tools": [{"function": {}}]}, 400, "tools[0].function.name"),
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
