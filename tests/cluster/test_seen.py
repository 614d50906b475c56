"""A cluster as its operator sees it, over HTTP and at a terminal: all replicas, the memory of each, and where requests
went."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcellar import Engine
from kvcellar.cluster.client import ClusterClient
from kvcellar.engine.messages import ReadStats
from kvcellar.inspector.routes import inspector
from kvcellar.serve import Server, ServeSettings, key_digest
from tests.cli.command import kvcellar
from tests.cluster.replicas import FaultyReplica, gateway, states
from tests.engine.places import PATIENCE, SMALL, eventually, model_in
from tests.serve.declared import DeclaredClient

MINE, YOURS, ADMIN = "sk-key-of-mine", "sk-key-of-yours", "sk-key-of-the-operator"
PROMPT = "The cellar keeps what was read. " * 8
Pair = dict[str, FaultyReplica]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return model_in(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def pair(model: Path) -> Iterator[Pair]:
    with closing(FaultyReplica(model, SMALL)) as one, closing(FaultyReplica(model, SMALL)) as other:
        yield {"replica-0": one, "replica-1": other}


@pytest.fixture(scope="module")
def cluster(pair: Pair) -> Iterator[tuple[Engine, ClusterClient]]:
    with gateway(pair) as found:
        yield found


@pytest.fixture(scope="module")
def server(cluster: tuple[Engine, ClusterClient]) -> Iterator[Server]:
    settings = ServeSettings(port=0, admin_digests=(key_digest(ADMIN),))
    with Server(cluster[0], settings, mount=inspector) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    headers = {"authorization": f"Bearer {ADMIN}"}
    with DeclaredClient(base_url=server.url, headers=headers, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def where(server: Server, tmp_path: Path) -> tuple[str, ...]:
    (tmp_path / "admin.txt").write_text(f"{ADMIN}\n")
    return "--url", server.url, "--admin-key-file", str(tmp_path / "admin.txt")


def asked(client: httpx.Client, prompt: str = PROMPT) -> str:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
    return client.post("/v1/completions", json=body).raise_for_status().json()["id"]


def replicas_of(client: httpx.Client) -> dict[str, Any]:
    (found,) = client.get("/admin/cluster").raise_for_status().json()["models"]
    return {one["name"]: one for one in found["replicas"]}


def test_all_replicas_are_listed_with_their_numbers(client: httpx.Client, cluster, where) -> None:
    asked(client)
    eventually(lambda: sum(one["blocks"] for one in replicas_of(client).values()), "it is published")
    own = cluster[0].stats().cells_cached
    eventually(lambda: sum(one["cells_cached"] for one in replicas_of(client).values()) == own > 0, "numbers follow")
    found = replicas_of(client)
    assert {name: one["state"] for name, one in found.items()} == dict.fromkeys(found, "connected")
    assert all(one["cells"] == cluster[1].replicas[0].cells > 0 for one in found.values())
    ran = kvcellar("cluster", "status", *where)
    assert (ran.code, ran.err) == (0, "")
    title, head, *rows = ran.out.splitlines()
    assert title == f"{cluster[0].model.name}: 0 requests moved, 0 unranked"
    assert head.startswith("REPLICA")
    assert [row.split()[:2] for row in rows] == [["replica-0", "connected"], ["replica-1", "connected"]]
    as_json = json.loads(kvcellar("cluster", "status", "--json", *where).out)
    assert [one["name"] for one in as_json["models"][0]["replicas"]] == list(found)


def test_the_record_of_a_request_says_where_it_went_and_what_was_considered(client: httpx.Client, where) -> None:
    asked(client)
    eventually(lambda: sum(one["blocks"] for one in replicas_of(client).values()), "it is published")
    request = asked(client)
    (prompt,) = client.get(f"/admin/requests/{request}").raise_for_status().json()["prompts"]
    (placement,) = prompt["placements"]
    best, other = placement["considered"]
    assert placement["replica"] == best["replica"]
    assert best["have"] > other["have"] == 0
    assert best["seconds"] <= other["seconds"]
    for command in (("why",), ("cluster", "why")):
        ran = kvcellar(*command, request, *where)
        assert (ran.code, ran.err) == (0, "")
        assert f"sent to {best['replica']}, the best of 2 by seconds to its first token" in ran.out
        assert f"    {other['replica']}  {other['seconds']:.4f}" in ran.out


def test_the_inspector_shows_the_memory_of_each_replica(client: httpx.Client, pair: Pair, where) -> None:
    asked(client)
    for one in pair.values():
        one.rests()

    def seen(**query: str) -> Any:
        return client.get("/inspector/api/snapshot", params=query).raise_for_status().json()

    steps = {name: one._client.ask(ReadStats()).steps for name, one in pair.items()}
    eventually(lambda: all(seen(replica=name)["engine"]["steps"] == steps[name] for name in pair), "they are seen")
    found = {name: seen(replica=name) for name in pair}
    for name, one in found.items():
        assert one["replica"] == name
        assert [replica["name"] for replica in one["replicas"]] == list(pair)
    assert seen()["replica"] == "replica-0"
    (name,) = [name for name in pair if found[name]["requests"]["ended"]][:1]
    number = found[name]["requests"]["ended"][0]["number"]
    way = client.get("/inspector/api/request", params={"replica": name, "number": number}).json()
    for other in pair.keys() - {name}:
        assert client.get("/inspector/api/request", params={"replica": other, "number": number}).status_code == 400
    entry = client.get("/inspector/api/entry", params={"replica": name, "name": way["entries"][0]["name"]}).json()
    assert entry["name"] == way["entries"][0]["name"]
    for route in ("snapshot?", "stream?", "request?number=0&", "entry?name=a&"):
        refused = client.get(f"/inspector/api/{route}replica=nowhere")
        assert refused.status_code == 400
        assert "no replica 'nowhere' of this model is connected" in refused.text
    ran = kvcellar("cluster", "top", "--replica", "replica-1", *where)
    assert (ran.code, ran.err) == (0, "")
    assert [line.split()[0] for line in ran.out.splitlines()[1:3]] == ["replica-0", "replica-1"]
    assert " at replica-1: 0 running" in ran.out


def test_one_of_several_keys_sees_that_replicas_are_there_and_no_number_of_them(cluster) -> None:
    keys: Any = {"key_digests": (key_digest(MINE), key_digest(YOURS)), "inspector": True}
    with Server(cluster[0], ServeSettings(port=0, **keys), mount=inspector) as server:
        with DeclaredClient(base_url=server.url, headers={"authorization": f"Bearer {MINE}"}) as client:
            asked(client)
            found = client.get("/inspector/api/snapshot").raise_for_status().json()["replicas"]
    assert [(one["name"], one["state"]) for one in found] == [("replica-0", "connected"), ("replica-1", "connected")]
    for one in found:
        assert not any(value for name, value in one.items() if name not in ("name", "state"))


def samples_of(client: httpx.Client) -> dict[str, float]:
    lines = client.get("/metrics").text.splitlines()
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines if not line.startswith("#")}


def test_metrics_have_replicas_by_state_and_requests_that_moved_or_were_not_compared(
    client: httpx.Client, cluster, pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, replicas = cluster
    monkeypatch.setattr("kvcellar.cluster.client.AGAIN", 0.02)
    name = f'model_name="{engine.model.name}"'
    steps = samples_of(client)[f"kvcellar_steps_total{{{name}}}"]
    pair["replica-1"].die_for_good()
    eventually(lambda: states(replicas)["replica-1"] == "lost", "it is gone")
    (lost,) = [one for one in replicas_of(client).values() if one["state"] == "lost"]
    assert lost["why"]
    found = samples_of(client)
    for state, count in {"connected": 1, "lost": 1, "refused": 0, "leaving": 0, "connecting": 0}.items():
        assert found[f'kvcellar_cluster_replicas{{{name},state="{state}"}}'] == count
    assert found[f"kvcellar_cluster_requests_moved_total{{{name}}}"] == replicas.moved
    assert found[f"kvcellar_cluster_requests_unranked_total{{{name}}}"] == replicas.unranked
    assert found[f"kvcellar_steps_total{{{name}}}"] >= steps
    pair["replica-1"].down = False
    eventually(lambda: states(replicas)["replica-1"] == "connected", "it is back")
    assert samples_of(client)[f"kvcellar_steps_total{{{name}}}"] >= steps


def test_a_server_of_one_engine_says_that_it_is_no_cluster(model: Path, tmp_path: Path) -> None:
    settings = ServeSettings(port=0, admin_digests=(key_digest(ADMIN),))
    (tmp_path / "admin.txt").write_text(f"{ADMIN}\n")
    with Engine(model, **SMALL) as engine, Server(engine, settings, mount=inspector) as server:
        with DeclaredClient(base_url=server.url, headers={"authorization": f"Bearer {ADMIN}"}) as client:
            assert client.get("/admin/cluster").raise_for_status().json() == {"models": []}
            request = asked(client)
            assert client.get(f"/admin/requests/{request}").json()["prompts"][0]["placements"] == []
            assert "kvcellar_cluster" not in "".join(samples_of(client))
            found = client.get("/inspector/api/snapshot").json()
            assert (found["replica"], found["replicas"]) == ("", [])
        ran = kvcellar("cluster", "status", "--url", server.url, "--admin-key-file", str(tmp_path / "admin.txt"))
        assert (ran.code, ran.out) == (2, "")
        assert "is no gateway of a cluster" in ran.err
