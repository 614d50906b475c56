"""A cluster on Ray Serve, as `kvcellar cluster serve` starts it: two replicas of the embedded model, and a gateway."""

import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
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


class Cluster:
    """One that runs, found by a secret in the environment of its processes."""

    def __init__(self, folder: Path) -> None:
        (self.port,) = free_ports(1)
        self._mark = secrets.token_hex(32)
        # Ray's sockets have paths of at most 107 bytes, and those of pytest are long.
        environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": self._mark, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "kvcellar", "cluster", "serve", "--replicas", "2", "--port", str(self.port)]
        self.log = (folder / "log").open("w")
        settings = ("--no-store", "--threads", "1", "--cache-bytes", "200M", "--record", "off")
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
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self._is_engine(pid)]

    def _is_engine(self, pid: int) -> bool:
        try:
            title = Path(f"/proc/{pid}/cmdline").read_bytes()
            ours = self._mark.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        except OSError:
            return False
        return title.startswith(b"ray::ServeReplica") and b":engine-" in title and ours

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
ray.init(num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
assert ray.get(ray.remote(lambda: 1).remote()) == 1
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    environment = os.environ | {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    ray = subprocess.run([sys.executable, "-c", RAY], env=environment, capture_output=True, text=True, check=False)
    if ray.returncode:
        pytest.skip(f"Ray itself does not run on this machine: {ray.stderr[-300:]}")
    found = Cluster(tmp_path_factory.mktemp("cluster"))
    try:
        found.wait()
        yield found
    finally:
        found.close()


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
