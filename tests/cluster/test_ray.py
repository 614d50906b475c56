"""A cluster on Ray Serve: two gateways and two engines, each of which has a Ray node of its own, with API keys, an
adapter and a shared store; and what `kvcellar cluster serve` starts by itself."""

import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import httpx
import psutil
import pytest

from benchmarks.cluster_ray import TOKEN, processes, replicas
from kvcellar import Engine
from kvcellar.cli.cluster import ENVIRONMENT, GATEWAY_PORTS, PORTS, free_ports
from kvcellar.engine.models import embedded
from tests.engine import places
from tests.engine.embedding_models import written
from tests.models import lora

ray = pytest.importorskip("ray", reason="ray is not installed (pip install kvcellar[cluster])")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="HAProxy and /proc are of Linux")

STARTING = 300.0  # seconds; only a test that fails waits so long
eventually = partial(places.eventually, seconds=STARTING)
INGRESS = range(30_000, 31_000)  # ports at which Ray lets gateways listen for HAProxy
GREEDY: Any = {"max_tokens": 24, "temperature": 0.0}
SEEDED: Any = {"max_tokens": 24, "temperature": 1.0, "seed": 5}
PROMPTS = [f"def part_{number}(cellar):\n    " for number in range(8)]
SOME = PROMPTS[:3]
CHAT = [{"role": "user", "content": "def main():"}]
ALICE, BOB, ADMIN = "key-of-alice", "key-of-bob", "key-of-admin"
NONE: Mapping[str, str] = MappingProxyType({})


class Cluster:
    """One that runs, found by the token in the environment of its processes."""

    def __init__(self, log: Path, command: Sequence[str], *, port: int, token: str, keys: Mapping[str, str]) -> None:
        # Ray's sockets have paths of at most 107 bytes, and those of pytest are long.
        environment = os.environ | {"RAY_AUTH_MODE": "token", TOKEN: token, "OMP_NUM_THREADS": "1"}
        self.port, self.token, self._keys, self._log = port, token, keys, log
        with log.open("w") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *command],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
            )
        self.client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=STARTING, headers=self.bearer("api"))

    def bearer(self, kind: str) -> dict[str, str]:
        """Headers with a key of this kind, if it has one."""
        return bearer(self._keys[kind]) if kind in self._keys else {}

    def wait(self) -> None:
        until = time.monotonic() + STARTING
        while True:
            self.still_runs()
            assert time.monotonic() < until, self._log.read_text()[-2000:]
            try:
                if self.client.get("/ready").status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            time.sleep(0.2)

    def still_runs(self) -> None:
        assert self.process.poll() is None, self._log.read_text()[-2000:]

    def close(self) -> None:
        self.client.close()
        self.process.send_signal(signal.SIGTERM)
        self.process.communicate(timeout=STARTING)

    def tell(self, line: str) -> str:
        """What it answers (`benchmarks/cluster_ray.py`)."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(line, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().strip()

    def engines(self) -> list[int]:
        """Their processes."""
        return replicas(self.token, "engine")

    def gateways(self) -> list[int]:
        """Ports of gateways, behind HAProxy."""
        found = [psutil.Process(pid).net_connections("inet") for pid in replicas(self.token, "gateway")]
        listening = {one.laddr.port for some in found for one in some if one.status == psutil.CONN_LISTEN}
        return sorted(listening & {*INGRESS})

    def address(self) -> str:
        """Of Ray."""
        titles = (title for _, title in processes(self.token, "") if "--gcs-address=" in title)
        return next(titles).split("--gcs-address=")[1].split("\0")[0]

    def running(self) -> float:
        """Completions, at all replicas."""
        lines = self.client.get("/metrics", headers=self.bearer("admin")).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith("kvcellar_completions_running{"))

    def text(self, prompt: str, **asked: Any) -> str:
        response = self.client.post("/v1/completions", json={"prompt": prompt, **asked})
        assert response.status_code == 200, response.text
        return response.json()["choices"][0]["text"]

    def stream(self, prompt: str, **sampling: Any) -> tuple[str, dict[str, Any]]:
        """The text of a stream, and its usage. Its connection is new: HAProxy closes those that rest when it is told of
        other gateways, and clients that use one at that moment have to send again."""
        asked = {"prompt": prompt, "stream": True, "stream_options": {"include_usage": True}, **sampling}
        text, usage = "", {}
        with (
            httpx.Client(base_url=self.client.base_url, headers=self.client.headers, timeout=STARTING) as client,
            client.stream("POST", "/v1/completions", json=asked) as response,
        ):
            assert response.status_code == 200, response.read()
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    part = json.loads(line.removeprefix("data: "))
                    assert "error" not in part, part
                    text += "".join(choice["text"] for choice in part["choices"])
                    usage = part.get("usage") or usage
        return text, usage


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def served(folder: Path, *options: str, of: Cluster | None = None, keys: Mapping[str, str] = NONE) -> Cluster:
    """`kvcellar cluster serve`. `of`: a cluster that runs, which is updated."""
    port = free_ports(1)[0] if of is None else of.port
    ray = () if of is None else ("--ray", of.address())
    own = ("--no-store", "--threads", "1", "--record", "off", "--port", str(port))
    command = ("kvcellar", "cluster", "serve", *options, *ray, *own)
    token = secrets.token_hex(32) if of is None else of.token
    return Cluster(folder / "log", command, port=port, token=token, keys=keys)


RAY = """
import ray
ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=100 << 20, log_to_driver=False)
assert ray.get(ray.remote(lambda: 1).remote()) == 1
"""


@contextmanager
def running(found: Cluster) -> Iterator[Cluster]:
    try:
        found.wait()
        yield found
    finally:
        found.close()


@pytest.fixture(scope="module")
def _ray() -> None:
    environment = os.environ | {TOKEN: secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    ray = subprocess.run([sys.executable, "-c", RAY], env=environment, capture_output=True, text=True, check=False)
    if ray.returncode:
        pytest.skip(f"Ray itself does not run on this machine: {ray.stderr[-300:]}")


class Made(NamedTuple):
    """What engines and gateways have in common."""

    model: Path
    adapter: Path
    store: str
    keys: Path
    admin: Path


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The embedded model embeds, too."""
    folder = tmp_path_factory.mktemp("made")
    model, keys, admin = folder / "embedded", folder / "keys.txt", folder / "admin.txt"
    shutil.copytree(Path(embedded.__file__).parent, model, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    written(model / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    shapes = {"q_proj": (192, 256), "v_proj": (192, 128)}
    layers = {f"model.layers.{at}.self_attn.{name}": shape for at in (1, 3) for name, shape in shapes.items()}
    adapter = lora.saved(folder / "adapter", layers, strength=2.0)
    keys.write_text(f"# name: alice\n{ALICE}\n\n# name: bob\n{BOB}\n")
    admin.write_text(f"{ADMIN}\n")
    return Made(model, adapter, f"file://{folder}/store", keys, admin)


@pytest.fixture(scope="module")
def cluster(_ray: None, made: Made, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    port = free_ports(1)[0]
    engine = {"threads": 1, "record": "off", "cache_bytes": 200_000_000, "store_remote": made.store}
    engine["adapters"] = {"style": [str(made.adapter)]}
    described = {"models": [str(made.model)], "replicas": 2, "gateways": 2, "engine": engine}
    described |= {"api_key_file": str(made.keys), "admin_key_file": str(made.admin)}
    log, token = tmp_path_factory.mktemp("cluster") / "log", secrets.token_hex(32)
    found = Cluster(log, ["benchmarks.cluster_ray"], port=port, token=token, keys={"api": ALICE, "admin": ADMIN})
    found.tell(json.dumps({"described": described, "port": port, "nodes": 2, "of_node": 1}))
    with running(found):
        eventually(lambda: len(found.gateways()) == 2, "both gateways listen")
        yield found


@pytest.fixture
def gateways(cluster: Cluster) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Each of both."""
    one, other = (
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=STARTING, headers=bearer(ALICE))
        for port in cluster.gateways()
    )
    with one, other:
        for each in (one, other):
            eventually(lambda each=each: each.get("/ready").status_code == 200, "it is ready")
        yield one, other


@pytest.fixture(scope="module")
def scaled(_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    options = ("--replicas", "0..2", "--idle", "3", "--max-sequences", "1", "--cache-bytes", "200M")
    with running(served(tmp_path_factory.mktemp("scaled"), *options)) as found:
        yield found


@pytest.fixture(scope="module")
def alone(made: Made) -> Iterator[Engine]:
    adapters = {"style": made.adapter}
    with Engine(made.model, threads=1, record="off", cache_bytes=200_000_000, adapters=adapters) as engine:
        yield engine


class Api(NamedTuple):
    """How a text is asked for, and where it is in an answer, and in a part of a stream."""

    path: str
    body: Mapping[str, Any]
    whole: Callable[[Any], str]
    part: Callable[[Any], str]


CHATTED = {"messages": CHAT, "max_tokens": 8, "temperature": 0}
APIS: Mapping[str, Api] = {
    "completions": Api(
        "/v1/completions",
        {"prompt": PROMPTS[0], "max_tokens": 8, "temperature": 0},
        lambda found: found["choices"][0]["text"],
        lambda part: part["choices"][0]["text"],
    ),
    "chat": Api(
        "/v1/chat/completions",
        CHATTED,
        lambda found: found["choices"][0]["message"]["content"],
        lambda part: part["choices"][0]["delta"].get("content") or "",
    ),
    "responses": Api(
        "/v1/responses",
        {"input": CHAT, "max_output_tokens": 8, "temperature": 0},
        lambda found: found["output"][0]["content"][0]["text"],
        lambda part: part["delta"] if part["type"] == "response.output_text.delta" else "",
    ),
    "messages": Api(
        "/v1/messages",
        CHATTED,
        lambda found: found["content"][0]["text"],
        lambda part: part["delta"]["text"] if part["type"] == "content_block_delta" else "",
    ),
    "ollama": Api(
        "/api/chat",
        {"messages": CHAT, "options": {"num_predict": 8, "temperature": 0}},
        lambda found: found["message"]["content"],
        lambda part: part["message"]["content"],
    ),
}


def answered(client: httpx.Client, api: Api, *, streams: bool, **more: Any) -> str:
    response = client.post(api.path, json={"model": "embedded", "stream": streams, **api.body, **more})
    assert response.status_code == 200, response.text
    if not streams:
        return api.whole(response.json())
    lines = [line.removeprefix("data: ") for line in response.text.splitlines()]
    return "".join(api.part(json.loads(line)) for line in lines if line.startswith("{"))


def test_ray_knows_the_names_of_its_settings() -> None:
    """One that it does not know would change nothing, and a port would be that of all clusters of a machine."""
    found = (
        Path(ray.__file__).parent / one for one in ("serve/_private/constants.py", "_common/usage/usage_constants.py")
    )
    known = "".join(one.read_text() for one in found)
    assert [name for name in (*ENVIRONMENT, *PORTS, *GATEWAY_PORTS) if f'"{name}"' not in known] == []


def test_texts_are_those_of_one_engine(cluster: Cluster, alone: Engine) -> None:
    for sampling in (GREEDY, SEEDED):
        assert [cluster.text(one, **sampling) for one in PROMPTS] == [
            alone.generate(one, **sampling).text for one in PROMPTS
        ]


def test_each_api_answers_alike_at_both_gateways_whole_and_in_a_stream(
    gateways: tuple[httpx.Client, httpx.Client], alone: Engine
) -> None:
    chat, vectors = alone.chat(CHAT, max_tokens=8, temperature=0.0).text, alone.embeddings.of(PROMPTS)
    for name, api in APIS.items():
        wanted = alone.generate(PROMPTS[0], max_tokens=8, temperature=0.0).text if name == "completions" else chat
        found = [answered(one, api, streams=streams) for one in gateways for streams in (False, True)]
        assert found == [wanted] * 4, name
    for one in gateways:
        embedded = one.post("/v1/embeddings", json={"model": "embedded", "input": PROMPTS}).json()["data"]
        for ours, theirs in zip(vectors, embedded, strict=True):
            assert theirs["embedding"] == pytest.approx(ours.vector, abs=1e-4)


def test_both_gateways_know_an_adapter(gateways: tuple[httpx.Client, httpx.Client], alone: Engine) -> None:
    plain, styled = (alone.generate(PROMPTS[0], adapter=one, **GREEDY).text for one in ("", "style"))
    assert plain != styled
    for one in gateways:
        found = answered(one, APIS["completions"], streams=False, model="style", **GREEDY)
        assert found == styled


def test_responses_and_conversations_go_on_at_the_other_gateway(gateways: tuple[httpx.Client, httpx.Client]) -> None:
    last, tokens = {}, 0
    assert gateways[0].post("/kvcellar/conversations", json={"name": "line"}).status_code == 201
    for turn in range(4):
        here, there = gateways[turn % 2], gateways[(turn + 1) % 2]
        asked = {"model": "embedded", "input": f"def turn_{turn}():", "max_output_tokens": 8, "temperature": 0, **last}
        made = here.post("/v1/responses", json=asked).json()
        assert there.get(f"/v1/responses/{made['id']}").json() == made
        assert made["usage"]["input_tokens"] > tokens
        last, tokens = {"previous_response_id": made["id"]}, made["usage"]["input_tokens"]
        message = {"role": "user", "content": f"def turn_{turn}():"}
        asked = {"model": "embedded", "messages": [message], "max_tokens": 8, "conversation": "line"}
        said = here.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
        line = there.get("/kvcellar/conversations/line").json()["messages"]
        assert (len(line), line[-1]["content"]) == (2 * turn + 2, said)


def test_what_one_gateway_has_sent_is_found_by_the_other_one_for_the_same_key_only(
    gateways: tuple[httpx.Client, httpx.Client],
) -> None:
    prompt = "\n".join(f"def shared_{number}(): pass" for number in range(40))

    def cached(client: httpx.Client) -> int:
        usage = client.post("/v1/completions", json={"prompt": prompt, **GREEDY}).json()["usage"]
        assert usage["prompt_tokens"] > 100
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert cached(gateways[0]) < 20
    eventually(lambda: cached(gateways[1]) > 100, "it is found")
    for one in gateways:
        one.headers.update(bearer(BOB))
    assert cached(gateways[1]) == 0
    eventually(lambda: cached(gateways[0]) > 100, "the other key has its own")


def test_the_page_and_metrics_show_both_replicas(cluster: Cluster) -> None:
    def shown() -> list[str]:
        found = cluster.client.get("/inspector/api/snapshot", headers=bearer(ADMIN)).raise_for_status().json()
        return [one["state"] for one in found["replicas"]]

    eventually(lambda: shown() == ["connected"] * 2, "both are used")
    metrics = cluster.client.get("/metrics", headers=bearer(ADMIN)).text
    assert 'kvcellar_cluster_replicas{model_name="embedded",state="connected"} 2.0' in metrics


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


def shown(gateways: Sequence[httpx.Client]) -> list[Any]:
    """What gateways know of their replicas."""
    found = [one.get("/admin/cluster", headers=bearer(ADMIN)).raise_for_status().json() for one in gateways]
    return [model for some in found for model in some["models"]]


def both_connected(gateways: Sequence[httpx.Client]) -> bool:
    return all([one["state"] for one in each["replicas"]] == ["connected"] * 2 for each in shown(gateways))


def test_streams_go_on_where_a_node_is_lost(
    cluster: Cluster, gateways: tuple[httpx.Client, httpx.Client], alone: Engine
) -> None:
    """With all processes on it, of which one is an engine."""
    sampling = SEEDED | {"max_tokens": 400, "ignore_eos": True}
    expected = [alone.generate(one, **sampling).text for one in PROMPTS]
    eventually(lambda: both_connected(gateways), "both engines are used")
    before, moved = set(cluster.engines()), sum(one["moved"] for one in shown(gateways))
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        streams = [pool.submit(cluster.stream, one, **sampling) for one in PROMPTS]
        eventually(lambda: cluster.running() >= len(PROMPTS) - 1, "they run")
        assert cluster.tell("node") == "killed"
        found = [one.result() for one in streams]
    assert sum(one["moved"] for one in shown(gateways)) > moved
    assert len(before & set(cluster.engines())) == 1
    assert [text for text, _ in found] == expected
    assert [usage["completion_tokens"] for _, usage in found] == [400] * len(PROMPTS)


@pytest.mark.slow  # new engines and gateways take minutes to start beside other tests
def test_streams_go_on_through_an_update(cluster: Cluster, made: Made, alone: Engine, tmp_path: Path) -> None:
    """Of all gateways and replicas, to other settings. What those had computed before, the new ones restore."""
    sampling = SEEDED | {"max_tokens": 200, "ignore_eos": True}
    expected = {prompt: alone.generate(prompt, **sampling).text for prompt in SOME}
    before, updated = set(cluster.engines()), threading.Event()
    long = "\n".join(f"def before_{number}(): pass" for number in range(40))
    cluster.text(long, **GREEDY)

    def ask(prompt: str) -> int:
        answers = 0
        while not updated.is_set() or not answers:
            text, usage = cluster.stream(prompt, **sampling)
            assert (text, usage["completion_tokens"]) == (expected[prompt], 200)
            answers += 1
        return answers

    options = (str(made.model), "--replicas", "2", "--cache-bytes", "150M", "--store-remote", made.store)
    options += ("--api-key-file", str(made.keys))
    with ThreadPoolExecutor(len(SOME)) as pool:
        asked = [pool.submit(ask, one) for one in SOME]
        try:
            eventually(lambda: cluster.running() >= len(SOME) - 1, "they run")
            with running(served(tmp_path, *options, of=cluster, keys={"api": ALICE})) as update:

                def done() -> bool:
                    update.still_runs()
                    return len(cluster.engines()) == 2 and not before & set(cluster.engines())

                eventually(done, "it is updated")
                updated.set()
                assert all(one.result() for one in asked)
                usage = cluster.stream(long, **GREEDY)[1]
                assert usage["prompt_tokens_details"]["cached_tokens"] > 100
        finally:
            updated.set()


@pytest.mark.slow  # likewise
def test_replicas_come_with_work_and_go_without_it_to_none_and_back(scaled: Cluster, alone: Engine) -> None:
    """There is room for one stream in each."""
    sampling = SEEDED | {"max_tokens": 150, "ignore_eos": True}
    expected = [alone.generate(one, **sampling).text for one in SOME]
    came = threading.Event()

    def ask(prompt: str) -> list[str]:
        """As long as it takes, which is longer than these streams."""
        texts = [scaled.stream(prompt, **sampling)[0]]
        while not came.is_set():
            texts.append(scaled.stream(prompt, **sampling)[0])
        return texts

    with ThreadPoolExecutor(len(SOME)) as pool:
        asked = [pool.submit(ask, one) for one in SOME]
        try:
            eventually(lambda: len(scaled.engines()) == 2, "another one comes")
        finally:
            came.set()
        for one, text in zip(asked, expected, strict=True):
            assert set(one.result()) == {text}
    eventually(lambda: not scaled.engines(), "both go")
    assert scaled.client.get("/ready").status_code == 200
    assert scaled.text(SOME[0], **sampling) == expected[0]
    assert len(scaled.engines()) == 1
