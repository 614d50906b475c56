"""Real engines in one server: requests in turn, unloading under pressure, a stream while another model is loaded."""

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from benchmarks.row import settled
from kvcellar import Engine
from kvcellar.cli.hosting import Engines
from kvcellar.engine.models.load import load
from kvcellar.errors import BadRequest
from kvcellar.frontend.process_client import ProcessClient
from kvcellar.kernels.layers import PanelWeight
from kvcellar.library.library import Library
from kvcellar.serve import ModelManager, Server, ServeSettings, key_digest
from tests.engine.fork_server import children, parent_of, there
from tests.library.made import made
from tests.models.lora import layers_of, merged, saved
from tests.serve.declared import DeclaredClient
from tests.serve.fake_engine import PATIENCE
from tests.serve.hosted import hosted
from tests.text import made as text
from tests.zoo import ARCHS

CACHE = 16_000_000
OPTIONS: dict[str, Any] = {
    "quiet": True, "memory": 10**9, "max_models": 2, "keep_alive": 300.0, "cache_bytes": CACHE, "device": "cpu",
    "dtype": "float32", "threads": 1, "max_sequences": 4, "draft": None,
}  # fmt: skip
PROMPT = "def add(a, b):"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model directory with a tokenizer and a chat template."""
    folder, tokenizer = tmp_path_factory.mktemp("models") / "tiny", text.KINDS["byte_level"]()
    ARCHS["llama"].build(vocab_size=tokenizer.get_vocab_size(), num_hidden_layers=1).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }} {% endfor %}")
    return folder


@pytest.fixture
def library(tmp_path: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> Library:
    """Three models of the same weights, which differ in a parameter."""
    monkeypatch.setenv("KVCELLAR_MODELS", str(tmp_path / "models"))
    found = Library(tmp_path / "models")
    for number, name in enumerate(("one", "two", "owner/three:small")):
        made(found, name, f"FROM {tiny}\nPARAMETER top_k {number + 5}", tiny.parent)
    return found


@contextmanager
def serving(tiny: Path, **options: Any) -> Iterator[tuple[ModelManager, Server]]:
    settings = ServeSettings(port=0, admin_digests=(key_digest("operator-1"),))
    with settled(), hosted((str(tiny),), **(OPTIONS | options)) as (host, *_), Server(host, settings) as server:
        yield host, server


def completed(server: Server, model: str | None) -> str:
    body = {"prompt": PROMPT, "max_tokens": 8, "temperature": 0} | ({"model": model} if model else {})
    response = httpx.post(f"{server.url}/v1/completions", json=body, timeout=PATIENCE)
    assert response.status_code == 200, response.text
    found = response.json()
    assert found["model"] == (model or "tiny")
    return found["choices"][0]["text"]


def taken(engine: Engine) -> int:
    """Bytes of weights, packed ones too, and of the cache with its largest step."""
    built = engine._built
    own = [p for p in built.loaded.model.parameters() if not isinstance(p, PanelWeight)]
    weights = sum({p.data_ptr(): p.nbytes for p in own}.values())
    return weights + (built.packing.bytes if built.packing else 0) + built.capacity.total


def test_models_are_used_in_turn_and_leave_for_each_other(tiny: Path, library: Library) -> None:
    with serving(tiny) as (host, server):
        listed = httpx.get(f"{server.url}/v1/models").json()["data"]
        assert [one["id"] for one in listed] == ["tiny", "one", "owner/three:small", "two"]
        texts = {completed(server, None)}
        engines: list[weakref.ref[Any]] = []
        for model in ("one", "two:latest", "owner/three:small", "one"):
            texts.add(completed(server, model))
            for loaded in host.engines():
                if (engine := loaded.engine) is not None:
                    can_use = loaded.spec.weights + engine._built.capacity.total  # type: ignore[attr-defined]
                    assert taken(engine) <= loaded.size == can_use  # type: ignore[arg-type]
                engines.append(weakref.ref(loaded.engine))
            host.check()
        assert len(texts) == 1, "the weights are the same"
        assert len(host.engines()) == 2
        gc.collect()
        alive = {id(engine) for reference in engines if (engine := reference()) is not None}
        assert len(alive) == 2, "the memory of what was unloaded is not free"


def test_what_is_not_in_the_library_is_not_looked_for(tiny: Path, library: Library, monkeypatch, tmp_path) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").symlink_to(tiny)
    with serving(tiny) as (_, server):
        for name in (
            "here",
            "./here",
            "../../etc/passwd",
            str(tmp_path / "here"),
            "a/b/../../c",
            "x" * 10_000,
            "\0",
            "",
        ):
            response = httpx.post(f"{server.url}/v1/completions", json={"model": name, "prompt": "a"})
            assert response.status_code == 404, name
            assert response.json()["error"]["code"] == "model_not_found"
            assert str(tmp_path) not in response.text.replace(name, "")


def test_a_stream_goes_on_while_another_model_is_loaded(tiny: Path, library: Library, monkeypatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    load = Engines.on_demand

    def held(self: Engines, *args: Any) -> Engine:
        begun.set()
        assert go_on.wait(PATIENCE)
        return load(self, *args)

    monkeypatch.setattr(Engines, "on_demand", held)
    with (
        serving(tiny) as (_, server),
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="any", max_retries=0, timeout=PATIENCE) as client,
    ):
        stream = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=200, temperature=0, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        other = threading.Thread(target=completed, args=(server, "one"))
        other.start()
        assert begun.wait(PATIENCE)
        during = sum(1 for _, _ in zip(range(20), stream, strict=False))
        assert during == 20
        assert not go_on.is_set()
        go_on.set()
        other.join()
        assert sum(1 for _ in stream) > 0


def test_conversations_outlive_the_engine(tiny: Path, library: Library) -> None:
    with serving(tiny) as (_, server), DeclaredClient(base_url=server.url, timeout=PATIENCE) as http:
        assert http.post("/kvcellar/conversations", json={"name": "talk"}).status_code == 201
        chat = {"messages": [{"role": "user", "content": "Hi"}], "conversation": "talk", "max_tokens": 4}
        for model in ("one", "two", "one"):
            response = http.post("/v1/chat/completions", json=chat | {"model": model})
            assert response.status_code == 200, response.text
        assert http.get("/kvcellar/conversations/talk").json()["messages_count"] == 6


def test_the_operator_sees_the_cache_of_a_model_that_is_loaded(tiny: Path, library: Library) -> None:
    key = {"authorization": "Bearer operator-1"}
    with serving(tiny) as (_, server), DeclaredClient(base_url=server.url, headers=key, timeout=PATIENCE) as http:
        assert http.get("/admin/cache?model=one").status_code == 409
        assert http.get("/admin/cache?model=four").status_code == 404
        completed(server, "one")
        assert http.get("/admin/cache?model=one").json()["device"]["namespaces"]
        assert not http.get("/admin/cache").json()["device"]["namespaces"]
        assert [one["model"] for one in http.get("/admin/requests").json()["requests"]] == ["one"]
        record = http.get("/admin/requests").json()["requests"][0]["id"]
        assert http.get(f"/admin/requests/{record}").status_code == 200


def test_engines_of_one_server_are_forks_of_one_process_and_end_with_their_models(tiny: Path, library: Library) -> None:
    options = OPTIONS | {"engine_process": True}
    with hosted((str(tiny), "one"), **options) as (host, _, engines), Server(host, ServeSettings(port=0)) as server:
        assert completed(server, "one") == completed(server, "tiny")
        pids = [client.pid for engine in engines if isinstance(client := engine._client, ProcessClient)]
        (forker,) = {parent_of(pid) for pid in pids}
        assert len({*pids}) == 2
        assert forker in children()
        engines[1].close()
        assert [there(pid) for pid in (*pids, forker)] == [True, False, True]
    assert not there(forker)


def projections(network: Any) -> dict[str, tuple[int, int]]:
    return layers_of(network, lambda name: name.endswith(("q_proj", "v_proj")))


def test_adapters_are_models_of_their_names_in_one_batch_with_the_model_without(tiny: Path, tmp_path: Path) -> None:
    network = load(tiny, device="cpu", dtype="float32").model
    adapters = {
        name: saved(tmp_path / name, projections(network), seed=seed) for seed, name in enumerate(("poet", "pirate"))
    }
    merges = {"tiny": network, **{name: merged(network, path) for name, path in adapters.items()}}
    wanted = {}
    for name, one in merges.items():
        with Engine(one, cache_bytes=CACHE, threads=1) as engine, Engine(tiny, cache_bytes=CACHE, threads=1) as text:
            wanted[name] = engine.generate(text.encode(PROMPT), max_tokens=8, temperature=0.0).token_ids
            wanted[name] = text.decode(wanted[name])
    assert len(set(wanted.values())) == 3, "the adapters change nothing"
    paths = {name: [str(path)] for name, path in adapters.items()}
    with serving(tiny, adapters=paths) as (host, server):
        listed = [one["id"] for one in httpx.get(f"{server.url}/v1/models").json()["data"]]
        assert listed[:3] == ["tiny", "poet", "pirate"]
        assert len(host.engines()) == 1
        with ThreadPoolExecutor(6) as pool:
            asked = [name for _ in range(4) for name in wanted]
            found = list(pool.map(lambda name: completed(server, name), asked))
        assert found == [wanted[name] for name in asked]


def test_an_adapter_with_the_name_of_a_model_is_refused(tiny: Path, tmp_path: Path) -> None:
    path = saved(tmp_path / "a", projections(load(tiny, device="cpu", dtype="float32").model))
    name = "a name that is taken"
    with serving(tiny, adapters={name: [str(path)]}) as (host, _), pytest.raises(BadRequest, match=f"name '{name}'"):
        host.name_adapter(name)
