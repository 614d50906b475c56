"""A chat about one image with a server that is killed in its middle: each turn computes what is new, and the image goes
through the tower once."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from .files import picture
from .test_whole import as_url
from .whole import ROWS, write_model

PATIENCE = 240.0
QUESTIONS = ("what is it?", "how many are there?", "of which colour?", "is it large?", "and where is it?")
REPLY: Any = {"max_tokens": 8, "temperature": 0.0, "structured_outputs": {"regex": "[a-z]{8}"}}


@contextmanager
def served(folder: Path, store: Path) -> Iterator[httpx.Client]:
    """By `kvcellar serve`, which is killed at the end."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = ["--port", str(port), "--store", str(store), "--cache-bytes", "60000000", "--threads", "1"]
    options += ["--record", "off", "--quiet"]
    command = [sys.executable, "-m", "kvcellar", "serve", str(folder), *options]
    process = subprocess.Popen(command, start_new_session=True)  # with its engine
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=PATIENCE) as http:
            eventually(http, lambda: http.get("/ready").status_code == 200)
            yield http
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def eventually(http: httpx.Client, is_so: Any) -> None:
    until = time.monotonic() + PATIENCE
    while True:
        try:
            if is_so():
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < until
        time.sleep(0.5)


def metric(http: httpx.Client, name: str) -> int:
    found = re.findall(rf"^{name}(?:\{{.*\}})? ([0-9.]+)$", http.get("/metrics").text, re.M)
    return sum(map(int, map(float, found)))


def alike_tokens(one: list[int], two: list[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))


def asks(http: httpx.Client, messages: list[Any], question: str, known: list[list[int]]) -> tuple[int, int]:
    """Ask one more question: how many tokens of the prompt were computed, and how many of it are not in `known`."""
    messages[-1:] = [messages[-1] | {"content": [*messages[-1]["content"], {"type": "text", "text": question}]}]
    prompt = http.post("/tokenize", json={"messages": messages}).json()["tokens"]
    response = http.post("/v1/chat/completions", json={"messages": messages, **REPLY})
    assert response.status_code == 200, response.text
    answer = response.json()
    usage, said = answer["usage"], answer["choices"][0]["message"]
    assert usage["prompt_tokens"] == len(prompt)
    messages += [{"role": "assistant", "content": said["content"]}, {"role": "user", "content": []}]
    alike = max((alike_tokens(prompt, one) for one in known), default=0)
    replied = http.post("/tokenize", json={"messages": messages[:-1], "add_generation_prompt": False}).json()["tokens"]
    known.append(replied[: len(prompt) + usage["completion_tokens"] - 1])  # the last one is drawn, and not computed
    return len(prompt) - usage["prompt_tokens_details"]["cached_tokens"], len(prompt) - min(alike, len(prompt) - 1)


@pytest.mark.slow
def test_a_chat_of_five_questions_on_an_image_goes_on_after_a_kill(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    write_model(tmp_path / "model")
    image = {"type": "image_url", "image_url": {"url": as_url(picture(seed=1))}}
    messages: list[Any] = [{"role": "user", "content": [{"type": "text", "text": 30 * "look at it. "}, image]}]
    known, counts = list[list[int]](), list[tuple[int, int]]()
    with served(tmp_path / "model", tmp_path / "store") as http:
        counts += [asks(http, messages, question, known) for question in QUESTIONS[:3]]
        assert metric(http, "kvcellar_images_encoded_total") == 1
        written = counts[0][0] + counts[1][0] + counts[2][0]
        eventually(http, lambda: metric(http, "kvcellar_store_written_tokens_total") >= written)
        eventually(http, lambda: metric(http, "kvcellar_store_staged_bytes") == 0)
    with served(tmp_path / "model", tmp_path / "store") as http:
        counts += [asks(http, messages, question, known) for question in QUESTIONS[3:]]
        assert metric(http, "kvcellar_images_encoded_total") == 0
    assert counts[0][0] > ROWS
    computed, ideal = map(sum, zip(*counts, strict=True))
    assert computed <= 1.02 * ideal, counts
