"""/metrics: what Prometheus reads of it is what requests reported and `stats()` has, and its counters never fall."""

import asyncio
import itertools
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import httpx
import pytest
from prometheus_client import REGISTRY
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as prometheus

from kvcellar.engine.stats import (
    ClusterStats,
    EngineStats,
    PrefixStats,
    SpeculationStats,
    StoreStats,
    TierStats,
    declared,
)
from kvcellar.events import Done, Event, Failed
from kvcellar.sampling_params import SamplingParams
from kvcellar.serve import Server, ServeSettings, key_digest
from kvcellar.serve.http.request_log import Buckets
from kvcellar.serve.metrics.engines import LATE, EngineCounts
from kvcellar.serve.models.model_manager import Lease, Limits
from tests.serve.fake_engine import PATIENCE, FakeEngine, engine_stats
from tests.serve.fake_host import World
from tests.serve.wire import COMPLETIONS, MODEL, completion, connected, request

Values = Mapping[tuple[str, tuple[tuple[str, str], ...]], float]
OPEN = "application/openmetrics-text; version=1.0.0"
TIERS = tuple(TierStats(name, 5, 10, 70, 30, False, {"read": 2}) for name in ("host", "disk"))
BUSY = engine_stats(
    at=float("inf"),  # it has just told them
    steps=40,
    preemptions=3,
    running=2,
    waiting=1,
    prefixes=PrefixStats(100, 90, 80, {"device": 50, "disk": 30}, {"new": 15, "evicted": 5}, 4, 60, 7, 11, 2),
    store=StoreStats(TIERS, 3, 0, 9, False, 21, 22, 23, {}),
    speculation=SpeculationStats("ngram", None, 4, 9, 8, 6, (), 0.0, 0),
    cluster=ClusterStats((), {"connected": 2, "lost": 1}, 5, 6),
)


def scraped(url: str, accept: str = "", key: str | None = None) -> Values:
    """All samples, by name and labels."""
    headers = {"accept": accept} | ({"authorization": f"Bearer {key}"} if key is not None else {})
    response = httpx.get(f"{url}/metrics", headers=headers, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    parse = openmetrics if accept else prometheus
    found: dict[Any, float] = {}
    for family in parse(response.text):
        assert family.documentation, family.name
        for sample in family.samples:
            place = sample.name, tuple(sorted(sample.labels.items()))
            assert place not in found, f"{place} is there twice"
            found[place] = sample.value
    return found


def value(values: Values, name: str, model: str = MODEL, **labels: str) -> float:
    return values[name, tuple(sorted({"model_name": model, **labels}.items()))]


@pytest.fixture
def counting() -> Iterator[tuple[FakeEngine, Server]]:
    """A server that has served nothing yet."""
    with FakeEngine() as engine, Server(engine, ServeSettings(port=0, metrics_compat="vllm")) as server:
        yield engine, server
        assert engine.rest()


def ended(url: str, requests: int) -> Values:
    """The samples once so many requests of the model have ended: a line is counted after the client has read it."""
    until = time.monotonic() + PATIENCE
    while True:
        found = scraped(url)
        counts = {at: n for at, n in found.items() if at[0] == "kvcellar_requests_total"}
        if sum(n for (_, labels), n in counts.items() if ("model_name", MODEL) in labels) == requests:
            return found
        assert time.monotonic() < until, f"{requests} requests of {MODEL} never ended: {counts}"


def post(server: Server, body: dict[str, Any]) -> dict[str, Any]:
    return httpx.post(f"{server.url}{COMPLETIONS}", json=body, timeout=PATIENCE).json()


def test_counts_are_those_that_the_responses_report(counting):
    engine, server = counting
    usages = []
    with engine.scripted(cached=3):
        usages += [post(server, completion("hello", max_tokens=n))["usage"] for n in (1, 2, 5)]
        usages.append(post(server, completion(["hi you", "you there"], n=2))["usage"])
    found = ended(server.url, 4)
    assert value(found, "kvcellar_prompt_tokens_total") == sum(one["prompt_tokens"] for one in usages)
    assert value(found, "kvcellar_generated_tokens_total") == sum(one["completion_tokens"] for one in usages)
    cached = sum(one["prompt_tokens_details"]["cached_tokens"] for one in usages)
    assert value(found, "kvcellar_cached_tokens_total") == cached == 15
    assert value(found, "kvcellar_requests_total", outcome="ok") == 4
    assert value(found, "kvcellar_request_prompt_tokens_count") == 5
    assert value(found, "kvcellar_request_prompt_tokens_bucket", le="5.0") == 3
    assert value(found, "kvcellar_request_prompt_tokens_sum") == sum(one["prompt_tokens"] for one in usages)
    assert value(found, "kvcellar_queue_seconds_sum") == 5 * 0.25
    assert value(found, "kvcellar_time_to_first_token_seconds_bucket", le="0.5") == 5
    assert value(found, "kvcellar_prefill_seconds_sum") == 5 * 0.25
    assert value(found, "kvcellar_request_seconds_count") == 4
    deltas = sum(one["completion_tokens"] for one in usages) - 7  # one gap less than tokens, for 7 completions
    assert value(found, "kvcellar_inter_token_seconds_count") == deltas
    assert value(found, "kvcellar_completions_finished_total", reason="length") == 2


@pytest.mark.parametrize("script", [{}, {"fail": ValueError("a secret")}])
def test_a_request_whose_last_event_is_delivered_does_not_run(script: dict[str, Any]) -> None:
    """Tests wait for a request to run: an answered one is not mistaken for the next."""
    with FakeEngine() as engine, engine.scripted(**script):
        running: list[tuple[Event, int]] = []
        engine.submit((5,), SamplingParams(), deliver=lambda event: running.append((event, engine.running)))
        assert engine.rest()
    assert isinstance(running[-1][0], Done | Failed)
    assert running[-1][1] == 0


def test_outcomes_are_counted_by_code_and_names_that_clients_choose_are_no_labels(counting):
    engine, server = counting
    for body in (
        completion(frob=1),
        completion() | {"model": "nobody/knows\n{this}"},
        completion() | {"model": "x" * 999},
    ):
        post(server, body)
    httpx.get(f"{server.url}/no/such/{'route' * 20}")
    with engine.scripted(fail=ValueError("a secret")):
        post(server, completion())
    with engine.scripted(gate=threading.Event()), connected(server) as wire:
        wire.sendall(request(COMPLETIONS, completion()))
        while not engine.running:
            time.sleep(0.001)  # else the thread of the engine may not get its lock
    found = ended(server.url, 2 + 1)
    assert value(found, "kvcellar_requests_total", outcome="internal_error") == 1
    assert value(found, "kvcellar_requests_total", outcome="client_gone") == 1
    assert value(found, "kvcellar_requests_total", outcome="unknown_parameter") == 1
    assert value(found, "kvcellar_requests_total", "", outcome="model_not_found") == 2
    assert value(found, "kvcellar_requests_total", "", outcome="not_found") == 1
    models = {label for _, labels in found for name, label in labels if name == "model_name"}
    assert models == {MODEL, ""}


def test_statistics_of_the_engine_are_there(counting):
    engine, server = counting
    engine.counted = BUSY
    found = scraped(server.url)
    assert value(found, "kvcellar_steps_total") == 40
    assert value(found, "kvcellar_completions_waiting") == 1
    assert value(found, "kvcellar_restored_tokens_total") == 80
    assert value(found, "kvcellar_recomputed_tokens_total", reason="evicted") == 5
    sources = {s: value(found, "kvcellar_tokens_by_source_total", source=s) for s in ("device", "disk", "computed")}
    assert sources == {"device": 50, "disk": 30, "computed": 20}
    assert value(found, "kvcellar_tier_read_bytes_total", tier="disk") == 30
    assert value(found, "kvcellar_tier_failures_total", tier="host", kind="read") == 2
    assert value(found, "kvcellar_checkpoints") == 7
    assert value(found, "kvcellar_accepted_tokens_total") == 6
    assert value(found, "kvcellar_stats_stale") == 0
    assert found["kvcellar_models_loaded", ()] == 1


def test_every_metric_of_an_engine_has_samples_where_it_has_everything():
    with FakeEngine() as engine, Server(engine, ServeSettings(port=0)) as server:
        engine.counted = replace(
            BUSY, recording=replace(BUSY.recording, by_modules={"few rows": 1}), recomputes={"no room": 1}
        )
        names = {name for name, _ in scraped(server.url)}
    every = {f"{one.name}_total" if one.kind == "counter" else one.name for one, _ in declared(EngineStats)}
    assert len(every) > 40
    assert every <= names


@pytest.mark.parametrize(
    ("accept", "modern"),
    [
        (OPEN, True),
        ("application/openmetrics-text", True),
        ("text/html, application/openmetrics-text;version=0.0.1;q=0.5, */*;q=0.1", True),
        ("application/openmetrics-text; version=abc; escaping=nothing", True),
        ("application/openmetrics-text; q=0", False),
        ("text/plain; version=xyz", False),
        ("*/*", False),
        ("; ,;;=, \xff", False),
    ],
)
def test_the_format_is_that_of_the_accept_header(http, engine, accept, modern):
    response = http.get("/metrics", headers={"accept": accept.encode("latin-1")})
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("application/openmetrics-text" if modern else "text/plain")
    assert response.text.endswith("# EOF\n") == modern
    assert list((openmetrics if modern else prometheus)(response.text))


def test_both_formats_have_the_same_samples(counting):
    engine, server = counting
    engine.counted = BUSY
    post(server, completion())
    ended(server.url, 1)
    plain, modern = scraped(server.url), scraped(server.url, OPEN)
    changing = "kvcellar_requests_total", (("model_name", ""), ("outcome", "ok"))  # the scrapes themselves
    assert {k: v for k, v in plain.items() if k != changing} == {k: v for k, v in modern.items() if k != changing}
    response = httpx.get(f"{server.url}/metrics", headers={"accept": OPEN})
    assert response.headers["content-type"].startswith("application/openmetrics-text")
    assert response.text.endswith("# EOF\n")
    assert httpx.get(f"{server.url}/metrics").headers["content-type"].startswith("text/plain; version=")


ALIASES = {
    "vllm:prompt_tokens_total": "kvcellar_prompt_tokens_total",
    "vllm:generation_tokens_total": "kvcellar_generated_tokens_total",
    "vllm:prefix_cache_hits_total": "kvcellar_restored_tokens_total",
    "vllm:num_requests_running": "kvcellar_completions_running",
    "vllm:num_requests_waiting": "kvcellar_completions_waiting",
    "vllm:num_preemptions_total": "kvcellar_preemptions_total",
    "vllm:spec_decode_num_accepted_tokens_total": "kvcellar_accepted_tokens_total",
    "vllm:e2e_request_latency_seconds_count": "kvcellar_request_seconds_count",
    "vllm:inter_token_latency_seconds_sum": "kvcellar_inter_token_seconds_sum",
}


def test_names_of_vllm_have_the_values_of_ours(counting):
    engine, server = counting
    engine.counted = BUSY
    post(server, completion("hello", max_tokens=4))
    found = ended(server.url, 1)
    assert {name: value(found, name) for name in ALIASES} == {
        name: value(found, ours) for name, ours in ALIASES.items()
    }
    assert value(found, "vllm:request_success_total", finished_reason="length") == 1
    assert value(found, "vllm:kv_cache_usage_perc") == 0
    (group,) = BUSY.groups
    engine.counted = replace(BUSY, groups=(group, replace(group, name="window", cells=10, used=4)))
    assert value(scraped(server.url), "vllm:kv_cache_usage_perc") == 0.4


def test_without_the_option_there_are_no_names_of_vllm(http, server, engine):
    assert not [name for name, _ in scraped(server.url) if name.startswith("vllm")]


def test_the_registry_of_the_library_is_not_used(counting):
    _, server = counting
    scraped(server.url)
    assert not [family for family in REGISTRY.collect() if "kvcellar" in family.name]


@pytest.mark.parametrize(("running", "waiting"), [(1, 0), (0, 1), (0, 0)])
def test_numbers_of_an_engine_that_is_at_work_and_has_told_none_for_long_are_stale(counting, running, waiting):
    engine, server = counting
    engine.counted = replace(BUSY, at=time.time() + PATIENCE, running=running, waiting=waiting)
    assert value(scraped(server.url), "kvcellar_stats_stale") == 0
    engine.counted = replace(engine.counted, at=time.time() - 2 * LATE, steps=41)
    found = scraped(server.url)
    assert value(found, "kvcellar_stats_stale") == bool(running or waiting)
    assert value(found, "kvcellar_steps_total") == 41


class Turns:
    """Random turns of a host: loads, unloads, and steps of engines, which are counted by model."""

    def __init__(self, seed: int) -> None:
        limits = Limits(max_bytes=100, max_models=2, keep_alive=5.0)
        self.rng, self.world = random.Random(seed), World(limits, dict.fromkeys("abc", (20, 10)))
        self.wanted = dict.fromkeys("abc", 0)
        self._stats: dict[int, EngineStats] = {}
        self.loop, self.waiters = asyncio.new_event_loop(), list[asyncio.Future[Lease]]()

    def stats(self, engine: Any) -> EngineStats:
        assert not engine.closed
        return self._stats.setdefault(id(engine), engine_stats())

    def load(self) -> None:
        host, spec = self.world.host, self.world.find(self.rng.choice("abc"))
        if (lease := host.take(spec)) is not None:
            lease.release()
        elif not host._wanted:
            self.waiters.append(self.loop.create_future())
            host._enter(spec, None, self.waiters[-1])
            host.step()

    def wait(self) -> None:
        for waiter in [one for one in self.waiters if one.done()]:
            waiter.result().release()
        self.world.now += self.rng.choice((1.0, 6.0))
        self.world.host.step()

    def work(self) -> None:
        while self.world.jobs:
            self.world.jobs.pop(0)()
            self.world.host.step()

    def count(self) -> None:
        for loaded in self.world.host.engines():
            if loaded.engine is not None:
                more, now = self.rng.randrange(5), self.stats(loaded.engine)
                self.wanted[loaded.spec.name] += more
                self._stats[id(loaded.engine)] = replace(now, steps=now.steps + more)


def test_counters_never_fall_while_models_are_loaded_and_unloaded(monkeypatch):
    turns = Turns(5)
    engine = "tests.serve.fake_host.SizedEngine"
    monkeypatch.setattr(f"{engine}.stats", lambda engine: turns.stats(engine), raising=False)
    monkeypatch.setattr(f"{engine}.last_stats", property(lambda engine: turns.stats(engine)), raising=False)
    reader = EngineCounts(turns.world.host)
    with turns.world.host.on_unload(reader.unload):
        for _ in range(400):
            turns.rng.choice((turns.load, turns.wait, turns.work, turns.count))()
            found = reader.read().values
            assert {model: found.get(model, {}).get(("kvcellar_steps", ()), 0) for model in "abc"} == turns.wanted
        assert turns.world.loads > 20
        turns.world.host.close()
    turns.loop.close()


def test_a_failed_engine_keeps_its_counters(counting):
    engine, server = counting
    engine.counted = BUSY
    engine.healthy = False
    found = scraped(server.url)
    assert (value(found, "kvcellar_steps_total"), value(found, "kvcellar_stats_stale")) == (40, 1)


KEYS = {"key_digests": (key_digest("client-key"),)}
ADMIN, METRICS = {"admin_digests": (key_digest("admin-key"),)}, {"metrics_digests": (key_digest("scrape-key"),)}


@pytest.mark.parametrize(
    ("keys", "accepted"),
    [
        ({}, {None, "client-key"}),
        (KEYS, {"client-key"}),
        (KEYS | ADMIN, {"admin-key"}),
        (KEYS | METRICS, {"scrape-key"}),
        (KEYS | ADMIN | METRICS, {"admin-key", "scrape-key"}),
        (METRICS, {"scrape-key"}),
    ],
    ids=["none", "API", "API and admin", "API and metrics", "all", "metrics"],
)
def test_the_key_of_an_operator_is_needed_where_there_is_one(shared_engine, engine, keys, accepted):
    with Server(shared_engine, ServeSettings(port=0, **keys)) as server:
        for key in (None, "client-key", "admin-key", "scrape-key", "wrong"):
            headers = {} if key is None else {"authorization": f"Bearer {key}"}
            status = httpx.get(f"{server.url}/metrics", headers=headers).status_code
            assert status == (200 if key in accepted or (not keys) else 401), key
        refused = httpx.get(f"{server.url}/v1/models", headers={"authorization": "Bearer scrape-key"})
        assert refused.status_code == (401 if "key_digests" in keys else 200)


def test_none_of_several_api_keys_reads_the_sums_of_all(shared_engine, engine):
    keys = key_digest("client-key"), key_digest("other-key")
    bearer = {"authorization": "Bearer client-key"}
    with Server(shared_engine, ServeSettings(port=0, key_digests=keys)) as server:
        assert httpx.get(f"{server.url}/metrics").status_code == 401
        assert httpx.get(f"{server.url}/metrics", headers=bearer).status_code == 403
    with Server(shared_engine, ServeSettings(port=0, key_digests=keys, **METRICS)) as server:
        assert httpx.get(f"{server.url}/metrics", headers=bearer).status_code == 401


def test_buckets_are_those_of_a_dumb_count():
    rng = random.Random(3)
    bounds = (1.0, 2.0, 5.0)
    parts = [[rng.choice((0.0, 1.0, 1.5, 2.0, 5.0, 5.1, 99.0)) for _ in range(rng.randrange(9))] for _ in range(20)]
    merged = Buckets(bounds)
    for part in parts:
        one = Buckets(bounds)
        for each in part:
            one.add(each)
        merged.merge(one)
    every = list(itertools.chain(*parts))
    assert merged.cumulative() == [
        *((repr(bound), sum(each <= bound for each in every)) for bound in bounds),
        ("+Inf", len(every)),
    ]
    assert merged.total == pytest.approx(sum(every))


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_has_no_complaint(counting):
    engine, server = counting
    engine.counted = BUSY
    post(server, completion("hello", max_tokens=3))
    ended(server.url, 1)
    with Server(engine, ServeSettings(port=0)) as plain:
        text = httpx.get(f"{plain.url}/metrics").text
    ran = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout + ran.stderr) == (0, "")
