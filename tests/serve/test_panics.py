"""Rust code of other packages that panics, which Python sees as a `BaseException`: the request gets a 500 in the form
of its API, the log says where it was, without text of the prompt, and all others are served."""

import asyncio
import logging
from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from kvcellar.serve.http.api_errors import ApiError
from kvcellar.serve.http.reader_threads import ReaderThreads
from kvcellar.serve.models.model_manager import Limits
from kvcellar.serve.ollama.library_routes import Run
from tests.serve.fake_host import World
from tests.serve.wire import CHAT, COMPLETIONS, chat, completion


@pytest.fixture(scope="module")
def panic() -> Callable[..., None]:
    """Raises what PyO3 raises."""
    broken = Tokenizer(models.BPE({"a": 0}, []))
    broken.pre_tokenizer = pre_tokenizers.FixedLength(0)
    return lambda *args, **options: broken.encode("a")


def test_a_panic_is_no_exception_for_python(panic):
    with pytest.raises(BaseException, match="chunk size") as raised:
        panic()
    assert not isinstance(raised.value, Exception)


@pytest.mark.parametrize("slow", ["encode", "render", "submit"])
@pytest.mark.parametrize(
    ("path", "keys"),
    [
        (COMPLETIONS, {"message", "type", "param", "code"}),
        (CHAT, {"message", "type", "param", "code"}),
        ("/v1/responses", {"message", "type", "param", "code"}),
        ("/v1/messages", {"message", "type"}),
        ("/api/chat", None),
    ],
)
def test_a_panic_is_a_500_in_the_form_of_the_api(http, engine, monkeypatch, caplog, panic, path, keys, slow):
    bodies = {COMPLETIONS: completion("my secret"), CHAT: chat("my secret"), "/v1/responses": {"input": "my secret"}}
    body = bodies.get(path) or chat("my secret") | ({} if path == "/api/chat" else {"max_tokens": 1})
    if slow == "render" and path == COMPLETIONS:
        pytest.skip("texts are not rendered")
    if slow == "encode" and path != COMPLETIONS:
        pytest.skip("chats are encoded when they are rendered")
    with caplog.at_level(logging.ERROR), monkeypatch.context() as patch:
        patch.setattr(engine, slow, panic)
        response = http.post(path, json=body)
    assert response.status_code == 500
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"]
    error = response.json()["error"]
    assert isinstance(error, str) if keys is None else set(error) == keys
    assert "PanicException" in caplog.text
    assert "secret" not in caplog.text
    assert http.post(COMPLETIONS, json=completion("others")).status_code == 200


def test_a_panic_of_a_load_is_an_error_of_those_who_wait(panic):
    made = World(Limits(max_bytes=100), {"a": (50, 10)})

    async def play() -> None:
        waiting = asyncio.create_task(made.host.lease(made.host.find("a")))
        await asyncio.sleep(0)
        try:
            panic()
        except BaseException as error:  # noqa: BLE001
            made.errors["a"] = error
        made.jobs.pop()()
        with pytest.raises(ApiError) as raised:
            await waiting
        assert (raised.value.status, raised.value.code) == (500, "internal_error")

    asyncio.run(play())
    made.host.close()


def test_a_panic_of_long_work_is_its_error(panic):
    async def play() -> None:
        threads = ReaderThreads()
        try:
            with pytest.raises(ApiError) as raised:
                await Run(threads, panic).result()
        finally:
            threads.close()
        assert (raised.value.status, raised.value.code) == (500, "internal_error")

    asyncio.run(play())
