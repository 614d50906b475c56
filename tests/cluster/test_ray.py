"""A cluster on Ray Serve, as `kvcellar cluster serve` starts it: two replicas of the embedded model, and a gateway."""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcellar import Engine
from kvcellar.cli.cluster import free_ports
from tests.engine.places import eventually

pytest.importorskip("ray", reason="ray is not installed (pip install kvcellar[cluster])")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="HAProxy and /proc are of Linux")

STARTING = 300.0  # seconds; only a test that fails waits so long
GREEDY: Any = {"max_tokens": 24, "temperature": 0.0}
SEEDED: Any = {"max_tokens": 24, "temperature": 1.0, "seed": 5}
PROMPTS = [f"def part_{number}(cellar):\n    " for number in range(8)]
SOME = PROMPTS[:3]


class Cluster:
    """One that runs, found by a secret in the environment of its processes."""

    def __init__(self, folder: Path, *options: str, of: "Cluster | None" = None) -> None:
        """`of`: one that runs, which is updated."""
        self.port = free_ports(1)[0] if of is None else of.port
        self._mark = secrets.token_hex(32) if of is None else of._mark
        # Ray's sockets have paths of at most 107 bytes, and those of pytest are long.
        environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._mark, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "kvcellar", "cluster", "serve", "--port", str(self.port), *options]
        command += [] if of is None else ["--ray", of.address()]
        self.log = (folder / "log").open("w")
        settings = ("--no-store", "--threads", "1", "--record", "off")
        self.process = subprocess.Popen([*command, *settings], env=environment, stdout=self.log, stderr=self.log)
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=120.0)

    def wait(self) -> None:
        until = time.monotonic() + STARTING
        while True:
            assert self.process.poll() is None, Path(self.log.name).read_text()[-2000:]
            assert time.monotonic() < until, Path(self.log.name).read_text()[-2000:]
            try:
                if self.client.get("/ready").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)

    def close(self) -> None:
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(STARTING)
        self.log.close()

    def engines(self) -> list[int]:
        """Processes of replicas of the engine."""
        return [pid for pid, title in self._processes("ray::ServeReplica") if ":engine-" in title]

    def address(self) -> str:
        """Of Ray."""
        titles = (title for _, title in self._processes("") if "--gcs-address=" in title)
        return next(titles).split("--gcs-address=")[1].split("\0")[0]

    def _processes(self, begin: str) -> Iterator[tuple[int, str]]:
        """Those of this cluster whose titles begin so."""
        for pid in filter(str.isdigit, os.listdir("/proc")):
            try:
                title = Path(f"/proc/{pid}/cmdline").read_text()
                ours = self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
            except (OSError, UnicodeDecodeError):
                continue
            if title.startswith(begin) and ours:
                yield int(pid), title

    def running(self) -> float:
        """Completions, at all replicas."""
        lines = self.client.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("kvcellar_completions_running{"))

    def text(self, prompt: str, **sampling: Any) -> str:
        response = self.client.post("/v1/completions", json={"prompt": prompt, **sampling})
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    def stream(self, prompt: str, **sampling: Any) -> tuple[str, dict[str, Any]]:
        """The text of a stream, and its usage."""
        asked = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, **sampling}
        text, usage = "", {}
        with self.client.stream("POST", "/v1/completions", json=asked) as response:
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    part = json.loads(line.removeprefix("data: "))
                    assert "error" not in part, part
                    text += "".join(choice["text"] for choice in part["choices"])
                    usage = part.get("usage") or usage
        return text, usage


RAY = """
import ray
ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
assert ray.get(ray.remote(lambda: 1).remote()) == 1
"""


@contextmanager
def running(folder: Path, *options: str, of: Cluster | None = None) -> Iterator[Cluster]:
    found = Cluster(folder, *options, of=of)
    try:
        found.wait()
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def _ray() -> None:
    environment = os.environ | {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    ray = subprocess.run([sys.executable, "-c", RAY], env=environment, capture_output=True, text=True, check=False)
    if ray.returncode:
        pytest.skip(f"Ray itself does not run on this machine: {ray.stderr[-300:]}")


@pytest.fixture(scope="module")
def cluster(_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("cluster"), "--replicas", "2", "--cache-bytes", "200M") as found:
        yield found


@pytest.fixture(scope="module")
def scaled(_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = ("--replicas", "0..2", "--idle", "3", "--max-sequences", "1", "--cache-bytes", "200M")
    with running(tmp_path_factory.mktemp("scaled"), *options) as found:
        yield found


@pytest.fixture(scope="module")
def alone() -> Iterator[Engine]:
    with Engine(threads=1, record="off", cache_bytes=200_000_000) as engine:
        yield engine


def test_texts_are_those_of_one_engine(cluster: Cluster, alone: Engine) -> None:
    for sampling in (GREEDY, SEEDED):
        assert [cluster.text(one, **sampling) for one in PROMPTS] == [
            alone.generate(one, **sampling).text for one in PROMPTS
        ]


def test_a_chat_over_the_apis_of_openai_anthropic_and_ollama_is_answered(cluster: Cluster) -> None:
    messages = [{"role": "user", "content": "def main():"}]
    asked = {"model": "embedded", "messages": messages, "max_tokens": 8, "temperature": 0}
    openai = cluster.client.post("/v1/chat/completions", json=asked).json()
    anthropic = cluster.client.post("/v1/messages", json=asked).json()
    options = {"num_predict": 8, "temperature": 0}
    asked = {"model": "embedded", "messages": messages, "stream": False, "options": options}
    ollama = cluster.client.post("/api/chat", json=asked).json()
    text = openai["choices"][0]["message"]["content"]
    assert text == anthropic["content"][0]["text"] == ollama["message"]["content"] != ""


def test_a_prompt_that_a_replica_has_is_read_from_its_memory(cluster: Cluster) -> None:
    prompt = "\n".join(f"def shared_{number}(): pass" for number in range(40))
    assert cluster.stream(prompt, **GREEDY)[1]["prompt_tokens"] > 100

    def found() -> bool:
        return cluster.stream(prompt, **GREEDY)[1]["prompt_tokens_details"]["cached_tokens"] > 100

    eventually(found, "it is found")


def test_the_page_and_metrics_show_both_replicas(cluster: Cluster) -> None:
    def shown() -> list[str]:
        found = cluster.client.get("/inspector/api/snapshot").raise_for_status().json()
        return [one["state"] for one in found["replicas"]]

    eventually(lambda: shown() == ["connected"] * 2, "both are used")
    assert (
        'kvcellar_cluster_replicas{model_name="embedded",state="connected"} 2.0' in cluster.client.get("/metrics").text
    )


def test_streams_go_on_where_a_replica_is_killed_and_another_one_takes_its_place(
    cluster: Cluster, alone: Engine
) -> None:
    sampling = SEEDED | {"max_tokens": 200, "ignore_eos": True}
    expected = [alone.generate(one, **sampling) for one in PROMPTS]
    before = cluster.engines()
    assert len(before) == 2
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        streams = [pool.submit(cluster.stream, one, **sampling) for one in PROMPTS]
        eventually(lambda: cluster.running() >= len(PROMPTS) - 1, "they run")
        os.kill(before[0], signal.SIGKILL)
        found = [one.result() for one in streams]
    assert [text for text, _ in found] == [one.text for one in expected]
    assert [usage["completion_tokens"] for _, usage in found] == [200] * len(PROMPTS)
    eventually(lambda: len(set(cluster.engines()) - {before[0]}) == 2, "another replica is started")
    assert cluster.text(PROMPTS[0], **GREEDY) == alone.generate(PROMPTS[0], **GREEDY).text


def test_streams_go_on_through_an_update(cluster: Cluster, alone: Engine, tmp_path: Path) -> None:
    """Of all gateways and replicas, to other settings."""
    sampling = SEEDED | {"max_tokens": 200, "ignore_eos": True}
    expected = {prompt: alone.generate(prompt, **sampling).text for prompt in SOME}
    before, updated = set(cluster.engines()), threading.Event()

    def ask(prompt: str) -> int:
        answers = 0
        while not updated.is_set() or not answers:
            text, usage = cluster.stream(prompt, **sampling)
            assert (text, usage["completion_tokens"]) == (expected[prompt], 200)
            answers += 1
        return answers

    with ThreadPoolExecutor(len(SOME)) as pool:
        asked = [pool.submit(ask, one) for one in SOME]
        try:
            eventually(lambda: cluster.running() >= len(SOME) - 1, "they run")
            with running(tmp_path, "--replicas", "2", "--cache-bytes", "150M", of=cluster):
                eventually(lambda: len(cluster.engines()) == 2 and not before & set(cluster.engines()), "it is updated")
                updated.set()
                assert all(one.result() for one in asked)
        finally:
            updated.set()


def test_replicas_come_with_work_and_go_without_it_to_none_and_back(scaled: Cluster, alone: Engine) -> None:
    """There is room for one stream in each."""
    sampling = SEEDED | {"max_tokens": 150, "ignore_eos": True}
    expected = [alone.generate(one, **sampling).text for one in SOME]
    with ThreadPoolExecutor(len(SOME)) as pool:
        streams = [pool.submit(scaled.stream, one, **sampling) for one in SOME]
        eventually(lambda: len(scaled.engines()) == 2, "another one comes")
        assert [one.result()[0] for one in streams] == expected
    eventually(lambda: not scaled.engines(), "both go")
    assert scaled.client.get("/ready").status_code == 200
    assert scaled.text(SOME[0], **sampling) == expected[0]
    assert len(scaled.engines()) == 1
