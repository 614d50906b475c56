"""The exact format of responses and streams, except for ids and times."""

import json
import threading
from collections.abc import Iterable
from itertools import chain

import pytest

from kvcellar.events import TokenLogprob
from tests.serve.wire import CHAT, COMPLETIONS, MODEL, chat, chunks_of, completion

TIMINGS = {
    "queued_ms": 250.0,
    "cache_n": 3,
    "prompt_n": 2,
    "prompt_ms": 250.0,
    "predicted_n": 5,
    "predicted_ms": 2000.0,
    "predicted_per_second": 2.5,
}
USAGE = {
    "prompt_tokens": 5,
    "completion_tokens": 5,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 3},
}


def stable(record: dict) -> dict:
    """A response without its id and time, which are checked here."""
    head = {"id": record.pop("id").split("-")[0], "created": record.pop("created") > 1_700_000_000}
    return {**head, **record}


def joined(lists: Iterable[list]) -> list:
    return list(chain.from_iterable(lists))


def test_a_completion(http, engine):
    with engine.scripted(cached=3):
        response = http.post(COMPLETIONS, json=completion("hello"))
    assert response.status_code == 200
    assert response.headers["x-request-id"].startswith("req-")
    assert stable(response.json()) == {
        "id": "cmpl",
        "object": "text_completion",
        "created": True,
        "model": MODEL,
        "system_fingerprint": None,
        "choices": [{"index": 0, "text": "hello", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": USAGE,
        "timings": TIMINGS,
    }


def test_a_chat_completion(http, engine):
    with engine.scripted(cached=3, output=b"grape"):
        response = http.post(CHAT, json={"messages": [{"role": "user", "content": ""}]}).json()
    message = {"role": "assistant", "content": "grape", "refusal": None}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    assert stable(response) == {
        "id": "chatcmpl",
        "object": "chat.completion",
        "created": True,
        "model": MODEL,
        "system_fingerprint": None,
        "choices": [choice],
        "usage": {
            "prompt_tokens": 6,
            "completion_tokens": 5,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 3},
        },
        "timings": TIMINGS | {"prompt_n": 3},
    }


def test_cached_tokens_are_always_present(http):
    assert http.post(COMPLETIONS, json=completion()).json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}


def test_order_of_the_chunks_of_a_chat_stream(http, engine):
    with engine.scripted(cached=3, output=b"ab"):
        response = http.post(CHAT, json=chat("he", stream=True, stream_options={"include_usage": True}))
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    chunks = chunks_of(response.text)
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1
    assert {(chunk["object"], chunk["model"]) for chunk in chunks} == {("chat.completion.chunk", MODEL)}
    *stable, last = chunks
    assert [chunk["choices"] for chunk in stable] == [
        [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "a"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {"content": "b"}, "logprobs": None, "finish_reason": None}],
        [{"index": 0, "delta": {}, "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
    ]
    assert all(chunk["usage"] is None for chunk in stable)
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 3}
    assert last["timings"]["predicted_n"] == 2


def test_a_completion_stream_without_usage(http):
    chunks = chunks_of(http.post(COMPLETIONS, json=completion("hey", stream=True)).text)
    assert all("usage" not in chunk and chunk["object"] == "text_completion" for chunk in chunks)
    assert [(c["choices"][0]["text"], c["choices"][0]["finish_reason"]) for c in chunks] == [
        ("h", None),
        ("e", None),
        ("y", None),
        ("", "stop"),
    ]


@pytest.mark.parametrize("options", [{}, {"include_usage": False}, {"include_usage": None}, None])
def test_usage_is_sent_only_on_request(http, options):
    chunks = chunks_of(http.post(COMPLETIONS, json=completion(stream=True, stream_options=options)).text)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("stream", [False, True])
def test_choices_are_numbered_over_all_prompts(http, stream):
    response = http.post(COMPLETIONS, json=completion(["abc", "xyz"], n=2, stream=stream))
    texts: dict[int, str] = {}
    records = chunks_of(response.text) if stream else [response.json()]
    for choice in (choice for record in records for choice in record["choices"]):
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {0: "abc", 1: "bca", 2: "xyz", 3: "yzx"}


def test_usage_of_several_prompts_is_their_sum(http):
    usage = http.post(COMPLETIONS, json=completion(["abc", "xy"], n=2)).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 10, 15)


@pytest.mark.parametrize(
    "options", [{"continuous_usage_stats": True}, {"continuous_usage_stats": True, "include_usage": True}]
)
@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_continuous_usage_of_each_choice(http, engine, route, options):
    body = completion(["abc", "xyzu"], n=2) if route == COMPLETIONS else chat("", n=2)
    prompts = [3, 3, 4, 4] if route == COMPLETIONS else [6, 6]
    with engine.scripted(cached=2):
        *chunks, last = chunks_of(http.post(route, json=body | {"stream": True, "stream_options": options}).text)
    written = [0] * len(prompts)
    for chunk in chunks:
        (choice,) = chunk["choices"]
        prompt, text = prompts[choice["index"]], choice.get("text") or choice.get("delta", {}).get("content")
        written[choice["index"]] += len(text or "")
        now = written[choice["index"]]
        assert chunk["usage"] == {"prompt_tokens": prompt, "completion_tokens": now, "total_tokens": prompt + now}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == sum(written)
    assert last["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


def test_include_usage_false_disables_continuous_usage(http):
    options = {"continuous_usage_stats": True, "include_usage": False}
    chunks = chunks_of(http.post(COMPLETIONS, json=completion(stream=True, stream_options=options)).text)
    assert all(chunk["choices"] and "usage" not in chunk for chunk in chunks)


def test_logprobs_with_token_ids_instead_of_text(http):
    logprobs = http.post(COMPLETIONS, json=completion("ab", logprobs=1, return_tokens_as_token_ids=True)).json()
    assert logprobs["choices"][0]["logprobs"]["tokens"] == ["token_id:97", "token_id:98"]
    assert logprobs["choices"][0]["logprobs"]["top_logprobs"] == [{"token_id:97": -0.125}, {"token_id:98": -0.25}]


@pytest.mark.parametrize(("prompt", "texts"), [([104, 105], ["hi"]), ([[104], [105, 33]], ["h", "i!"])])
def test_prompts_may_be_token_ids(http, prompt, texts):
    choices = http.post(COMPLETIONS, json=completion(prompt)).json()["choices"]
    assert [choice["text"] for choice in choices] == texts


def test_logprobs_of_a_completion(http):
    logprobs = http.post(COMPLETIONS, json=completion("né", logprobs=1)).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["n", r"bytes:\xc3", r"bytes:\xa9"],
        "token_logprobs": [-0.125, -0.25, -0.375],
        "top_logprobs": [{"n": -0.125}, {r"bytes:\xc3": -0.25}, {r"bytes:\xa9": -0.375}],
        "text_offset": [0, 1, 1],
    }


def test_completion_logprobs_include_the_sampled_token(http):
    logprobs = http.post(COMPLETIONS, json=completion("a", logprobs=0)).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"a": -0.125}]
    logprobs = http.post(COMPLETIONS, json=completion("a", logprobs=3)).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"a": -0.125, "b": -1.125, "c": -2.125}]


def test_logprobs_of_a_chat(http, engine):
    with engine.scripted(output="aé".encode()):
        choice = http.post(CHAT, json=chat(logprobs=True, top_logprobs=2)).json()["choices"][0]
    first, *halves = choice["logprobs"]["content"]
    assert first == {
        "token": "a",
        "logprob": -0.125,
        "bytes": [97],
        "top_logprobs": [
            {"token": "a", "logprob": -0.125, "bytes": [97]},
            {"token": "b", "logprob": -1.125, "bytes": [98]},
        ],
    }
    assert [half["bytes"] for half in halves] == [[0xC3], [0xA9]]
    assert [half["token"] for half in halves] == ["\ufffd", "\ufffd"]
    assert [one["bytes"] for one in halves[0]["top_logprobs"]] == [[0xC3], [0xC4]]
    assert choice["logprobs"]["refusal"] is None


def test_chat_logprobs_without_top(http):
    content = http.post(CHAT, json=chat("a", logprobs=True)).json()["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in content)


@pytest.mark.parametrize("route", [COMPLETIONS, CHAT])
def test_a_stream_equals_a_whole_response(http, route):
    body = completion("grüße 🍇", logprobs=2) if route == COMPLETIONS else chat("grüße 🍇", logprobs=True)
    body |= {"n": 3, "return_token_ids": True, "stop": "🍇"}
    whole = http.post(route, json=body).json()["choices"]
    chunks = chunks_of(http.post(route, json=body | {"stream": True}).text)
    for expected in whole:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == expected["index"]]
        if route == COMPLETIONS:
            assert "".join(part["text"] for part in parts) == expected["text"]
            lists = [part["logprobs"] for part in parts if part["logprobs"]]
            assert {key: joined(found[key] for found in lists) for key in lists[0]} == expected["logprobs"]
        else:
            assert "".join(part["delta"].get("content", "") for part in parts) == expected["message"]["content"]
            lists = [part["logprobs"]["content"] for part in parts if part["logprobs"]]
            assert joined(lists) == expected["logprobs"]["content"]
        assert joined(part["token_ids"] for part in parts) == expected["token_ids"]
        ends = [part for part in parts if part["finish_reason"]]
        assert [(end["finish_reason"], end["stop_reason"]) for end in ends] == [("stop", "🍇")]
        assert parts[-1] is ends[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("stop", [None, "d"])
@pytest.mark.parametrize("text", ["é1🍇2", "a🍇🍇b", "🍇c🍇dé"])
def test_a_token_begins_where_its_character_does(http, text, stop, stream):
    """And so the offsets never go back."""
    body = completion(text, logprobs=0, stream=stream, stop=stop)
    response = http.post(COMPLETIONS, json=body)
    whole = chunks_of(response.text) if stream else [response.json()]
    found = [choice["logprobs"] for one in whole for choice in one["choices"] if choice["logprobs"]]
    begins = [at for at, char in enumerate(text) for _ in char.encode()]
    until = text.encode().find(b"d") + 1 if stop is not None and stop in text else len(begins)
    assert joined(one["text_offset"] for one in found) == begins[:until]


def test_every_likely_token_has_a_name_of_its_own(http, engine, monkeypatch):
    """Of those that have one text, one is named by it: the token itself, else the most likely."""
    monkeypatch.setattr("tests.serve.fake_engine._logprobs", _halves)
    monkeypatch.setattr(
        type(engine), "decode", lambda self, ids, **how: "x" * len(ids) if ids[0] < 100 else _decoded(ids)
    )
    with engine.scripted(output=bytes([98, 200, 97])):
        logprobs = http.post(COMPLETIONS, json=completion("a", logprobs=4)).json()["choices"][0]["logprobs"]
    for token, score, top in zip(logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True):
        assert len(top) == 4
        assert top[token] == score
        assert [*top.values()] == [-0.25, -0.5, -1.0, -2.0]
    assert [*logprobs["top_logprobs"][0]] == ["token_id:97", "x", r"bytes:\xc8", r"bytes:\xc9"]
    assert [*logprobs["top_logprobs"][1]] == ["x", "token_id:98", r"bytes:\xc8", r"bytes:\xc9"]
    assert logprobs["tokens"] == ["x", r"bytes:\xc8", "x"]


def _halves(token, at, top):
    likely = ((97, -0.25), (98, -0.5), (200, -1.0), (201, -2.0))
    return (TokenLogprob(token, dict(likely)[token], likely),)


def _decoded(ids):
    return bytes(ids).decode(errors="replace")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("echo", [False, True])
def test_the_ids_of_prompts_are_told_with_each_choice_of_a_completion(http, stream, echo):
    body = completion(["hi", "há"], n=2, stream=stream, echo=echo, max_tokens=2, add_special_tokens=False)
    wanted = http.post(COMPLETIONS, json=body | {"return_token_ids": True})
    told = chunks_of(wanted.text) if stream else [wanted.json()]
    for index in range(4):
        parts = [one for chunk in told for one in chunk["choices"] if one["index"] == index]
        prompts = [part["prompt_token_ids"] for part in parts if "prompt_token_ids" in part]
        assert prompts == [[*("hi", "há")[index // 2].encode()]]
        assert "prompt_token_ids" in parts[0]
        assert len(joined(part["token_ids"] for part in parts)) == 2
    assert "prompt_token_ids" not in http.post(COMPLETIONS, json=body).text


@pytest.mark.parametrize("stream", [False, True])
def test_the_ids_of_the_prompt_are_told_once_of_a_chat(http, stream):
    body = chat("hi", n=2, stream=stream)
    wanted = http.post(CHAT, json=body | {"return_token_ids": True})
    told = chunks_of(wanted.text) if stream else [wanted.json()]
    assert [one["prompt_token_ids"] for one in told if "prompt_token_ids" in one] == [[*b"<user>hi"]]
    assert "prompt_token_ids" in told[0]
    assert all("token_ids" in choice for one in told for choice in one["choices"])
    assert "prompt_token_ids" not in http.post(CHAT, json=body).text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("path", "body"), [(CHAT, chat("hi", n=2)), (COMPLETIONS, completion("hi", n=2))])
def test_each_token_has_its_time_since_the_first(http, path, body, stream):
    body = body | {"stream": stream, "max_tokens": 5}
    wanted = http.post(path, json=body | {"return_token_times": True, "return_token_ids": True})
    told = chunks_of(wanted.text) if stream else [wanted.json()]
    for index in range(2):
        parts = [one for chunk in told for one in chunk["choices"] if one["index"] == index]
        times = joined(part.get("token_ms", []) for part in parts)
        assert len(times) == len(joined(part["token_ids"] for part in parts)) > 1
        assert times == sorted(times)
        assert times[0] == 0
    assert "token_ms" in http.post(path, json=body | {"return_token_times": True}).text
    assert "token_ms" not in http.post(path, json=body).text


def test_impossible_tokens_have_openais_minimum_logprob(http, engine, monkeypatch):
    monkeypatch.setattr("tests.serve.fake_engine._logprobs", _one_impossible)
    logprobs = http.post(COMPLETIONS, json=completion("a", logprobs=1)).json()["choices"][0]["logprobs"]
    assert logprobs["top_logprobs"] == [{"a": -0.5, "b": -9999.0}]


def _one_impossible(token, at, top):
    return (TokenLogprob(token, -0.5, ((token, -0.5), (token + 1, float("-inf")))),)


def test_a_stream_is_ascii_so_that_no_client_splits_its_lines(http):
    response = http.post(COMPLETIONS, json=completion("a\u2028b\x85c\r\nd", stream=True))
    assert response.content.isascii()
    assert len(response.text.splitlines()) == len(response.text.split("\n")) - 1
    assert "".join(c["choices"][0]["text"] for c in chunks_of(response.text)) == "a\u2028b\x85c\r\nd"


def test_finish_reason_length(http):
    choice = http.post(COMPLETIONS, json=completion("hello", max_tokens=3)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("hel", "length")


def test_a_stream_without_data_sends_empty_lines(http, engine):
    gate = threading.Event()
    with engine.scripted(gate=gate), http.stream("POST", COMPLETIONS, json=completion("hi", stream=True)) as response:
        lines = response.iter_lines()
        assert next(lines) == ""
        gate.set()
        assert [json.loads(line[6:])["choices"][0]["text"] for line in lines if line.startswith("data: {")] == [
            "h",
            "i",
            "",
        ]


def test_models(http):
    (card,) = http.get("/v1/models").json()["data"]
    assert card.pop("created") > 1_700_000_000
    assert card.pop("created_at").endswith("Z")
    own = {"id": MODEL, "object": "model", "owned_by": "kvcellar", "max_model_len": 20_000}
    assert card == own | {"type": "model", "display_name": MODEL}
    assert http.get(f"/v1/models/{MODEL}").json()["id"] == MODEL
    assert http.get("/v1/models/cellar%2Ffake-1").json()["id"] == MODEL


def test_health(http, engine):
    assert http.get("/health").json() == {"status": "ok", "model": MODEL}
    engine.healthy = False
    response = http.get("/health")
    assert (response.status_code, response.json()["error"]["type"]) == (503, "unavailable_error")
