"""Bodies and responses that are long: their memory is limited, and other tasks run meanwhile."""

import asyncio
import json
import threading
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.serve import Server, ServeSettings
from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.http.body import SHORT_BODY, BodyBudget, RequestBody
from kvcellar.serve.http.connection import READ, READ_OF_BODY, Connection
from kvcellar.serve.http.json_text import json_chunks, to_json
from kvcellar.serve.http.sending import send_json
from tests.serve.wire import COMPLETIONS, completion, connected, error_of, read_response, request


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    )
)
def test_json_chunks_join_to_the_whole_json(value: object) -> None:
    assert b"".join(json_chunks(value)) == to_json(value)


@pytest.mark.parametrize("count", [0, 1, 63, 64, 65, 1000])
def test_an_iterator_is_encoded_as_a_list_in_chunks(count: int) -> None:
    pieces = list(json_chunks({"a": [{"b": iter(range(count))}]}))
    assert (
        json.loads(b"".join(pieces))
        == {"a": [{"b": list(range(count))}]}
        == json.loads(to_json({"a": [{"b": iter(range(count))}]}))
    )
    assert max(map(len, pieces)) < 64 * 5


def test_vectors_are_encoded_one_at_a_time() -> None:
    vectors = [tuple(map(float, range(at, at + 65))) for at in range(5)]
    for items in (vectors, [{"index": at, "embedding": list(vector)} for at, vector in enumerate(vectors)]):
        pieces = list(json_chunks(iter(items)))
        assert b"".join(pieces) == to_json(items)
        assert max(map(len, pieces)) < 2 * len(to_json(items[-1]))


def test_other_tasks_run_while_a_long_response_is_encoded() -> None:
    turns, sent = 0, list[bytes]()
    entries = [{"token": "x" * 20, "top": list(range(20))} for _ in range(6400)]

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def main() -> None:
        counting = asyncio.create_task(others())
        await send_json(send, {"choices": [{"logprobs": {"content": iter(entries)}}]})
        counting.cancel()

    asyncio.run(main())
    assert json.loads(b"".join(sent))["choices"][0]["logprobs"]["content"] == entries
    assert turns >= 6400 // 64


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 40_000)), max_size=30))
def test_bodies_stay_within_the_budget_and_release_it(parts: list[tuple[int, int]]) -> None:
    budget = BodyBudget(50_000)
    bodies = [RequestBody(budget) for _ in range(4)]
    for which, size in parts:
        body = bodies[which]
        before = len(body.data)
        with suppress(ApiError):
            body.add(bytes(size))
        assert len(body.data) in (before, before + size)
        counted = sum(max(0, len(one.data) - SHORT_BODY) for one in bodies)
        assert budget.used == counted <= budget.limit
    for body in bodies:
        body.release()
        body.release()
    assert budget.used == 0


def test_long_bodies_beyond_the_limit_are_refused_and_short_ones_are_not(engine, monkeypatch) -> None:
    entered, go_on = threading.Semaphore(0), threading.Event()
    encode = engine.encode

    def held(text: str, **kwargs: Any) -> list[int]:
        if len(text) > 1:
            entered.release()
            assert go_on.wait(120)
        return encode(text, **kwargs)

    monkeypatch.setattr(engine, "encode", held)
    settings = ServeSettings(port=0, max_body_bytes=40_000, max_bodies_bytes=60_000)
    long = request(COMPLETIONS, completion("a" * 19_000, max_tokens=1, user="b" * 20_000))
    with (
        Server(engine, settings) as server,
        connected(server) as first,
        connected(server) as second,
        connected(server) as third,
    ):
        for wire in (first, second):
            wire.sendall(long)
            assert entered.acquire(timeout=120)
        third.sendall(long)
        status, body = read_response(third)
        assert (status, json.loads(body)["error"]["code"]) == (503, "overloaded")
        third.sendall(request(COMPLETIONS, completion("a", max_tokens=1)))
        assert read_response(third)[0] == 200
        go_on.set()
        assert [read_response(wire)[0] for wire in (first, second)] == [200, 200]
        third.sendall(long)
        assert read_response(third)[0] == 200


@pytest.mark.parametrize(("chunk", "most"), [(1, READ), (40_000, READ), (None, READ_OF_BODY)])
def test_received_data_is_parsed_in_small_parts_except_where_it_has_nothing_to_parse(
    server, monkeypatch, chunk, most
) -> None:
    """The bytes behind a body of known length may be of another request."""
    sizes: list[int] = []
    receive = Connection.data_received

    def watched(self: Connection, data: bytes) -> None:
        sizes.append(len(data))
        receive(self, data)

    monkeypatch.setattr(Connection, "data_received", watched)
    body = json.dumps(completion("a" * 15_000, max_tokens=1)).encode() + b" " * 100_000
    framing, data = f"Content-Length: {len(body)}", body
    if chunk is not None:
        framing, parts = "Transfer-Encoding: chunked", range(0, len(body), chunk)
        data = b"".join(b"%x\r\n%b\r\n" % (len(part := body[at : at + chunk]), part) for at in parts) + b"0\r\n\r\n"
    with connected(server) as wire:
        wire.sendall(request(COMPLETIONS, None, "Content-Type: application/json", framing, method="POST") + data)
        assert read_response(wire)[0] == 200
        of_body = len(sizes)
        wire.sendall(request("/health") * 200)
        assert [read_response(wire)[0] for _ in range(200)] == [200] * 200
    assert sum(sizes) > len(data)
    assert max(sizes) <= most
    assert (max(sizes[:of_body]) > READ) == (chunk is None)
    assert max(sizes[of_body:]) <= READ


@pytest.mark.parametrize("fields", [{"prompt": "hello"}, {"prompt": ["hello", "you"]}])
def test_the_context_limit_is_passed_to_the_tokenizer(http, engine, monkeypatch, fields) -> None:
    limits: list[int | None] = []
    encode = engine.encode

    def noted(text: str, *, limit: int | None = None, **kwargs: Any) -> list[int]:
        limits.append(limit)
        return encode(text, limit=limit, **kwargs)

    monkeypatch.setattr(engine, "encode", noted)
    assert http.post(COMPLETIONS, json=fields).status_code == 200
    assert set(limits) == {engine.model.context}


def test_completions_per_request_are_limited(http, engine) -> None:
    error = error_of(http.post(COMPLETIONS, json=completion(["a"] * 256, n=17)))
    assert error["param"] == "n"
    assert not engine.seen


@pytest.mark.parametrize(
    ("name", "value"),
    [("logit_bias", {str(n): "x" for n in range(16_384)}), ("stop_token_ids", ["x"] * 16_000), ("stop", [1] * 16_000)],
)
def test_only_the_first_of_many_invalid_items_is_named(http, name: str, value: object) -> None:
    response = http.post(COMPLETIONS, json=completion(**{name: value}))
    assert response.status_code == 400
    assert len(response.content) < 500
    assert (error_of(response)["param"] or "").startswith(name)
