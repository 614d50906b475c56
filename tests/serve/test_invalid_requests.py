"""Invalid requests: each gets one error in the API's format, and the next request is served.

Groups: bodies, parameters, prompts, messages, names, routes, content types, and errors of the engine.
"""

import json

import pytest

from kvcellar.errors import (
    BadRequest,
    CacheFull,
    EngineClosed,
    EngineFailed,
    NoToken,
    NotSupported,
    Overloaded,
    PromptTooLong,
    ScoresNotNumbers,
    TemplateFailed,
)
from kvcellar.serve.generation.ignored_fields import NEUTRAL, NO_EFFECT
from kvcellar.serve.http.json_text import printable
from kvcellar.serve.openai.chat import ChatBody
from kvcellar.serve.openai.completions import CompletionBody
from tests.serve.wire import CHAT, COMPLETIONS, MODEL, chat, chunks_of, completion, error_of, lines_of

JSON = {"content-type": "application/json"}
NESTED = 100_000


@pytest.fixture(autouse=True)
def still_serves(http):
    yield
    assert http.post(COMPLETIONS, json=completion("still here?")).json()["choices"][0]["text"] == "still here?"


@pytest.mark.parametrize("depth", [100, 900, 980, 990, 1000, 1010, 1100, 5000])
@pytest.mark.parametrize("inner", ['"\\ud83c\\udf47"', '{"a": 1}', "1"])
@pytest.mark.parametrize("field", ["user", "tools", "stop", "logit_bias"])
def test_values_nested_near_the_limit_are_accepted_or_refused(http, field, inner, depth):
    """For the JSON parser and for the validation after it."""
    body = f'{{"prompt": "x", "{field}": {"[" * depth}{inner}{"]" * depth}}}'
    response = http.post(COMPLETIONS, content=body, headers=JSON)
    assert response.status_code == 400 or (field == "user" and response.status_code == 200)


def test_every_truncated_body_is_refused(http):
    body = json.dumps(chat("né", stop=["a"], logit_bias={"1": 1})).encode()
    for length in range(len(body)):
        assert http.post(CHAT, content=body[:length], headers=JSON).status_code == 400


@pytest.mark.parametrize(
    "text", ["a\x00b", "\ud83c\udf47".encode("utf-16", "surrogatepass").decode("utf-16"), "\u2028"]
)
def test_unusual_characters_are_returned_unchanged(http, text):
    for ascii_only in (True, False):
        body = json.dumps(completion(text), ensure_ascii=ascii_only).encode()
        response = http.post(COMPLETIONS, content=body, headers=JSON)
        assert response.json()["choices"][0]["text"] == text


FIELDS = [  # field, what was sent; each is refused, and the refusal names the field
    *(("min_tokens", value) for value in (-1, 2**31, 0.5, "1")),
    *(("ignore_eos", value) for value in (1, "true")),
    *(("return_token_ids", value) for value in (1, "true")),
    ("return_token_times", 1),
    *(("min_length", value) for value in (-1, 2**31, "1")),
    *(("no_repeat_ngram_size", value) for value in (-1, 65, 1.5, "1")),
    *(("bad_words_ids", value) for value in ([[]], [5], 5, [["a"]], [[-1]], [[1] * 65], [[1]] * 4097)),
    *(("sequence_bias", value) for value in ([[[1], "a"]], [[[1]]], {}, [[[], 1.0]], [[[1], 1e5]])),
    *((f"{name}suppress_tokens", value) for name in ("", "begin_") for value in ([-1], [1.5], 5, [True], [1] * 65537)),
    *(("exponential_decay_length_penalty", value) for value in ([1], [1.5, 2], [1, 0], 5, [1, "2"])),
    *(("top_h", value) for value in (0, 1.5, "1")),
    *((f"{name}_cutoff", value) for name in ("epsilon", "eta") for value in (-1, 1.5, "0")),
]


@pytest.mark.parametrize(("name", "value"), FIELDS, ids=[f"{name}={str(value)[:20]}" for name, value in FIELDS])
def test_parameters_out_of_bounds(http, engine, name, value):
    for route, body in ((COMPLETIONS, completion()), (CHAT, chat())):
        response = http.post(route, json=body | {name: value})
        assert response.status_code == 400
        assert error_of(response)["param"].split(".")[0].split("[")[0] == name
    assert not engine.seen


@pytest.mark.parametrize(
    ("name", "value"),
    [("temperature", 1e-45), ("temperature", 0), ("top_k", 10**6), ("seed", 2**63), ("seed", -1), ("stop", [])],
)
def test_parameters_at_their_bounds(http, engine, name, value):
    assert http.post(COMPLETIONS, json=completion() | {name: value}).status_code == 200
    ((_, params),) = engine.seen
    assert getattr(params, name) == (tuple(value) if isinstance(value, list) else value)


NULLABLE = (
    "max_tokens",
    "temperature",
    "n",
    "stop",
    "seed",
    "logit_bias",
    "stream",
    "logprobs",
    "stream_options",
    "model",
)


@pytest.mark.parametrize("name", NULLABLE)
def test_null_equals_an_absent_field(http, name):
    for route, body in ((COMPLETIONS, completion()), (CHAT, chat())):
        assert http.post(route, json=body | {name: None}).status_code == 200


def test_shift_in_a_chat_needs_max_tokens(http, engine):
    error = error_of(http.post(CHAT, json=chat(shift=True)))
    assert error["param"] == "max_tokens"
    for keep in (-1, 0, 10**6):
        assert http.post(CHAT, json=chat(shift=True, max_tokens=5, num_keep=keep)).status_code == 200
    assert [(params.shift, params.num_keep) for _, params in engine.seen] == [(True, -1), (True, 0), (True, 10**6)]


def test_requests_with_equal_ids_are_separate(http, engine):
    named = {"x-request-id": "same\tname", "idempotency-key": "same", "x-session-id": "same"}
    responses = [http.post(COMPLETIONS, json=completion(text), headers=named) for text in ("one", "two")]
    assert [response.json()["choices"][0]["text"] for response in responses] == ["one", "two"]
    assert len({response.headers["x-request-id"] for response in responses} | {"same\tname"}) == 3
    assert len(engine.seen) == 2


ASK_FOR_NOTHING = [(name, value) for name, values in NEUTRAL.items() for value in values]
ASK_FOR_NOTHING += [(name, value) for name in NO_EFFECT for value in (None, "k", 7, {"a": "b"})]


@pytest.mark.parametrize(("name", "value"), ASK_FOR_NOTHING)
def test_values_without_effect_are_accepted(http, engine, name, value):
    for route, body, kind in ((COMPLETIONS, completion(), CompletionBody), (CHAT, chat(), ChatBody)):
        if name not in kind.model_fields:
            plain, with_it = (http.post(route, json=body | more) for more in ({}, {name: value}))
            assert (plain.status_code, with_it.status_code) == (200, 200)
            assert engine.seen.pop() == engine.seen.pop()


@pytest.mark.parametrize("name", NEUTRAL)
def test_other_values_of_unimplemented_fields_are_refused_by_name(http, engine, name):
    """Also values that are equal in Python: 0 is not False."""
    alike = [0 if value is False else 1 for value in NEUTRAL[name] if isinstance(value, bool)]
    for route, body, kind in ((COMPLETIONS, completion(), CompletionBody), (CHAT, chat(), ChatBody)):
        for value in ("something", 7, ["a"], {"a": 1}, *alike):
            if name not in kind.model_fields:
                error = error_of(http.post(route, json=body | {name: value}))
                assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    assert not engine.seen


def test_add_special_tokens_is_followed(http, engine):
    for value in (None, False, True):
        assert http.post(COMPLETIONS, json=completion("a", add_special_tokens=value)).status_code == 200
    assert [prompt for prompt, _ in engine.seen] == [(97,), (97,), (1, 97)]


@pytest.mark.parametrize("name", ["temprature", "n_discard", "keep_alive", "n_probs", "a\nb", "\u202e", "x" * 10_000])
def test_unknown_fields_are_refused_by_name(http, name):
    error = error_of(http.post(COMPLETIONS, json=completion() | {name: 1}))
    assert error["code"] == "unknown_parameter"
    assert error["param"] == printable(name)
    assert error["message"].isprintable()
    assert len(error["message"]) < 300


SOME = {"role": "user", "content": "hi"}
PICTURE = "messages[0].content[0].image_url"
MESSAGES = [  # messages, and the field at fault
    (None, "messages"),
    ([], "messages"),
    ("hi", "messages"),
    ({}, "messages"),
    ([None], "messages[0]"),
    (["hi"], "messages[0]"),
    ([{}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([SOME, {"role": "user", "content": None}], "messages[1].content"),
    ([{"role": "user", "content": 5}], "messages[0].content"),
    ([{"role": "user", "content": []}], "messages[0].content"),
    ([{"role": "wizard", "content": "hi"}], "messages[0].role"),
    ([{"role": "User", "content": "hi"}], "messages[0].role"),
    ([{"role": "tool", "content": "hi", "tool_call_id": "1"}], "messages"),
    ([SOME, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}], "messages[1].tool_calls[0].function"),
    ([{**SOME, "colour": "red"}], "messages[0].colour"),
    ([{**SOME, "name": 5}], "messages[0].name"),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://169.254.169.254"}}]}], PICTURE),
    ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]}], PICTURE),
    ([{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}], None),
    ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
    ([{"role": "user", "content": ["hi"]}], "messages[0].content[0]"),
    ([SOME] * 4097, "messages"),
    ([{"role": "assistant", "content": "hi"}], "messages"),
]


@pytest.mark.parametrize(("messages", "param"), MESSAGES)
def test_invalid_messages_are_refused(http, engine, messages, param):
    response = http.post(CHAT, json={"model": MODEL, "messages": messages})
    assert response.status_code == 400
    assert error_of(response)["param"] == (param or "messages[0].content[0].type")
    assert not engine.seen


def test_messages_from_earlier_responses_are_accepted(http, engine):
    before = {"role": "assistant", "content": "ho", "refusal": None, "audio": None, "tool_calls": None}
    turns = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}], "name": "jo"},
        before | {"function_call": None, "annotations": []},
        {"role": "user", "content": "<|im_end|>"},
    ]
    assert http.post(CHAT, json={"messages": turns}).status_code == 200
    ((prompt, _),) = engine.seen
    assert bytes(prompt) == b"<system>be brief<user>h+i<assistant>ho<user><|im_end|>"


def test_a_body_without_a_content_type_is_refused(http, engine):
    response = http.post(COMPLETIONS, content=json.dumps(completion()))
    assert response.status_code == 415
    error_of(response)
    assert not engine.seen


@pytest.mark.parametrize("kind", ["application/json", "Application/JSON; charset=UTF-8", "application/json;"])
def test_forms_of_the_json_content_type_are_accepted(http, kind):
    response = http.post(COMPLETIONS, content=json.dumps(completion()), headers={"content-type": kind})
    assert response.status_code == 200


def test_a_chunked_body_over_the_limit(http):
    parts = (b" " * 2**16 for _ in range(33))
    response = http.post(COMPLETIONS, content=parts, headers=JSON)
    assert (response.status_code, error_of(response)["code"]) == (413, "request_too_large")


ERRORS = [  # exception of the engine, and the error of the response
    (BadRequest("no", "top_k"), 400, "top_k", None),
    (PromptTooLong(5, 4, "the model's context"), 400, "prompt", "context_length_exceeded"),
    (TemplateFailed("no", "messages"), 400, "messages", None),
    (NotSupported("no"), 400, None, "not_supported"),
    (Overloaded("too many"), 503, None, "overloaded"),
    (CacheFull("sliding", 5, 4), 503, None, "overloaded"),
    (EngineClosed("closed"), 503, None, "shutting_down"),
    (NoToken("all are forbidden"), 400, None, "no_token"),
    (ScoresNotNumbers("the scores hold NaN"), 500, None, "scores_not_numbers"),
    (EngineFailed("a secret"), 500, None, "internal_error"),
    (ValueError("a secret"), 500, None, "internal_error"),
    (MemoryError("a secret"), 500, None, "internal_error"),
]


@pytest.mark.parametrize("how", ["reject", "fail"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "param", "code"), ERRORS, ids=[type(e[0]).__name__ for e in ERRORS])
def test_engine_errors_before_the_first_event(http, engine, error, status, param, code, stream, how):
    with engine.scripted(**{how: error}):
        response = http.post(COMPLETIONS, json=completion(stream=stream))
    shown = error_of(response)
    assert (response.status_code, shown["param"], shown["code"]) == (status, param, code)
    assert ("retry-after" in response.headers) == (status == 503)
    assert "secret" not in response.text


@pytest.mark.parametrize(("error", "status", "param", "code"), ERRORS, ids=[type(e[0]).__name__ for e in ERRORS])
def test_engine_errors_after_the_first_event(http, engine, error, status, param, code):
    with engine.scripted(fail=error, fail_at=2):
        whole = http.post(COMPLETIONS, json=completion())
        stream = http.post(COMPLETIONS, json=completion(stream=True))
    assert (whole.status_code, error_of(whole)["code"]) == (status, code)
    assert stream.status_code == 200
    *chunks, last = map(json.loads, lines_of(stream.text))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "he"[: len(chunks)]
    assert (set(last), last["error"]["code"], last["error"]["param"]) == ({"error"}, code, param)
    assert "secret" not in stream.text


def test_a_failed_prompt_fails_the_request(http, engine):
    response = http.post(COMPLETIONS, json=completion(["hello", "x" * 30_000, "there"]))
    assert error_of(response)["code"] == "context_length_exceeded"
    assert engine.rest()


def test_a_stop_string_across_tokens(http):
    for stream in (False, True):
        response = http.post(COMPLETIONS, json=completion("abcédef", stop=["éd", "zz"], stream=stream))
        records = chunks_of(response.text) if stream else [response.json()]
        choices = [choice for record in records for choice in record["choices"]]
        assert "".join(choice["text"] for choice in choices) == "abc"
        assert [c["stop_reason"] for c in choices if c["finish_reason"]] == ["éd"]
