"""Uploads end in the order of their work, also when the threads are closed."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from kvcellar.serve.http import reader_threads
from kvcellar.serve.http.body import SHORT_BODY, BodyBudget, RequestBody
from kvcellar.serve.http.reader_threads import ReaderThreads
from tests.serve.fake_engine import PATIENCE


def test_an_upload_ends_after_the_threads_were_closed_and_after_its_work() -> None:
    threads, goes_on, order = ReaderThreads(), threading.Event(), list[str]()

    def write() -> None:
        goes_on.wait(PATIENCE)
        order.append("written")

    async def run() -> None:
        task = asyncio.create_task(threads.run("upload", write))
        await asyncio.sleep(0)  # it is submitted
        threads.close()
        asyncio.get_running_loop().run_in_executor(None, goes_on.set)
        threads.end_upload(lambda: order.append("ended"))
        await task

    asyncio.run(run())
    assert order == ["written", "ended"]


def test_a_second_end_is_run_as_well() -> None:
    threads, ended = ReaderThreads(), list[int]()
    threads.close()
    for number in range(2):
        threads.end_upload(lambda number=number: ended.append(number))
    assert ended == [0, 1]


@pytest.mark.parametrize(
    ("body", "pool"),
    [
        (b'{"input": "hi"}', "kvcellar-short"),
        (b'{"conversation": "a"}', "kvcellar-files"),
        (b'{"previous_response_id": "resp_1"}', "kvcellar-files"),
        (b'{"previous\\u005fresponse_id": "resp_1"}', "kvcellar-files"),
        (b'{"input": "' + b"a" * SHORT_BODY + b'", "previous_response_id": "resp_1"}', "kvcellar-long"),
    ],
)
def test_what_continues_stored_text_keeps_no_short_body_waiting(body: bytes, pool: str) -> None:
    threads, found = ReaderThreads(), RequestBody(BodyBudget(10**9))
    found.add(body)
    try:
        name = asyncio.run(threads.read(found, lambda: threading.current_thread().name))
    finally:
        found.release()
        threads.close()
    assert name.rpartition("_")[0] == pool


def test_a_long_body_is_not_searched_on_the_event_loop(monkeypatch) -> None:
    """Which takes 10 ns for each byte."""
    searched = list[int]()
    search = SimpleNamespace(search=lambda data: searched.append(len(data)))
    monkeypatch.setattr(reader_threads, "_CONTINUES", search)
    threads = ReaderThreads()
    for length in (SHORT_BODY, SHORT_BODY + 1):
        found = RequestBody(BodyBudget(10**9))
        found.add(b"a" * length)
        asyncio.run(threads.read(found, lambda: None))
        found.release()
    threads.close()
    assert searched == [SHORT_BODY]
