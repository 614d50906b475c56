"""Models of the library that differ in adapters and defaults only run on one engine, each as if it were alone."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvcellar import Engine
from kvcellar.cli.hosting import Engines
from kvcellar.engine.core.request import Request
from kvcellar.engine.models.adapters.adapters import check_adapter
from kvcellar.engine.models.load import load
from kvcellar.library.library import Library
from kvcellar.serve import ModelManager, Server, ServeSettings
from tests.library.made import FakeTools, made
from tests.models.lora import saved
from tests.serve.fake_engine import PATIENCE
from tests.serve.hosted import hosted
from tests.serve.test_several_models import OPTIONS, PROMPT, projections, serving, tiny

__all__ = ["tiny"]  # a fixture

NAMES = ("base", "poet", "pirate")
TEMPLATE = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
MESSAGES = [{"role": "user", "content": "Hi"}]


class Tools(FakeTools):
    """Checks adapters as the command does."""

    def check_adapter(self, directory: Path, adapter: Path) -> None:
        check_adapter(directory, adapter)


@pytest.fixture(scope="module")
def adapters(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    layers = projections(load(tiny, device="cpu", dtype="float32").model)
    folder = tmp_path_factory.mktemp("adapters")
    return {name: saved(folder / name, layers, seed=seed) for seed, name in enumerate(("a", "b", "c"))}


def filled(root: Path, tiny: Path, adapters: dict[str, Path]) -> Library:
    found = Library(root)
    texts = {
        "base": f"FROM {tiny}",
        "poet": f"FROM {tiny}\nADAPTER {adapters['a']}\nPARAMETER temperature 0\nSYSTEM Rhyme.",
        "pirate": f"FROM base\nADAPTER {adapters['b']}\nTEMPLATE {TEMPLATE}\nMESSAGE user Ahoy\nMESSAGE assistant Aye",
    }
    for name, text in texts.items():
        made(found, name, text, tiny.parent, tools=Tools())
    return found


@pytest.fixture
def library(tmp_path: Path, tiny: Path, adapters: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> Library:
    monkeypatch.setenv("KVCELLAR_MODELS", str(tmp_path / "models"))
    return filled(tmp_path / "models", tiny, adapters)


@pytest.fixture(scope="module")
def wanted(
    tiny: Path, adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[str, tuple[str, int]]]:
    """What each model says on an engine of its own."""
    root = tmp_path_factory.mktemp("library") / "models"
    filled(root, tiny, adapters)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KVCELLAR_MODELS", str(root))
        return {name: alone(name) for name in NAMES}


def post(server: Server, route: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{server.url}{route}", json=body, timeout=PATIENCE)


def completed(server: Server, model: str, prompt: str = PROMPT, tokens: int = 8) -> str:
    found = post(server, "/v1/completions", model=model, prompt=prompt, max_tokens=tokens, temperature=0)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["text"]


def chatted(server: Server, model: str) -> tuple[str, int]:
    """The text, and how many tokens the prompt has."""
    found = post(server, "/v1/chat/completions", model=model, messages=MESSAGES, max_tokens=6, temperature=0)
    assert found.status_code == 200, found.text
    return found.json()["choices"][0]["message"]["content"], found.json()["usage"]["prompt_tokens"]


def alone(name: str) -> tuple[str, tuple[str, int]]:
    """What a model of the library says on an engine of its own."""
    options: dict[str, Any] = {"cache_bytes": OPTIONS["cache_bytes"], "threads": 1, "dtype": "float32"}
    with Engine(name, **options) as engine, Server(engine, ServeSettings(port=0)) as server:
        return completed(server, name), chatted(server, name)


def comes(condition: Callable[[], bool]) -> bool:
    end = time.monotonic() + PATIENCE
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def loaded(server: Server) -> dict[str, dict[str, Any]]:
    """The models of the library that are loaded, by name."""
    found = httpx.get(f"{server.url}/api/ps", timeout=PATIENCE).json()["models"]
    return {one["name"].removesuffix(":latest"): one for one in found if ":" in one["name"]}


def engine_of(host: ModelManager) -> Any:
    """The engine of the models of the library."""
    (found,) = [one for one in host.engines() if not one.fixed]
    return found.engine


def test_models_of_one_base_share_an_engine_and_say_what_each_says_alone(
    tiny: Path, library: Library, wanted: dict[str, tuple[str, tuple[str, int]]]
) -> None:
    assert len({text for text, _ in wanted.values()}) == 3, "the adapters change nothing"
    assert len({count for _, (_, count) in wanted.values()}) == 3, "the prompts are the same"
    with serving(tiny) as (host, server):
        asked = [name for _ in range(3) for name in NAMES]
        with ThreadPoolExecutor(6) as pool:
            chats = pool.map(lambda name: chatted(server, name), asked)
            texts = list(pool.map(lambda name: completed(server, name), asked))
        assert texts == [wanted[name][0] for name in asked]
        assert list(chats) == [wanted[name][1] for name in asked]
        engine = engine_of(host)
        assert len(engine.adapters.list()) == 2
        poet = post(server, "/v1/completions", model="poet", prompt=PROMPT, max_tokens=8)
        assert poet.json()["choices"][0]["text"] == wanted["poet"][0], "its own temperature is 0"
        host.check()
        engine.check()


@contextmanager
def steps_held(engine: Any, held: Callable[[list[Request]], bool]) -> Iterator[None]:
    """No step of the engine begins while `held` returns True for its requests that are not done. The calls of its inbox
    run. `held` is called on the engine's thread."""
    loop, over = engine._loop, threading.Event()
    step = loop._step

    def step_or_wait() -> None:
        if not over.is_set() and held(list(loop._requests.values())):
            time.sleep(0.001)  # the loop runs its inbox, and comes back
        else:
            step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "_step", step_or_wait)
        try:
            yield
        finally:
            over.set()


def test_their_requests_run_in_one_batch(tiny: Path, library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tiny) as (host, server):
        for name in NAMES:
            completed(server, name)
        engine, together, all_in = engine_of(host), list[int](), threading.Event()
        scheduler = engine._built.loop.scheduler
        schedule = scheduler.schedule

        def noted() -> Any:
            found = schedule()
            together.append(len({one.completion.request.adapter for one in found[0]}))
            return found

        def some_missing(requests: list[Request]) -> bool:
            if len(requests) == len(NAMES):
                all_in.set()
            return not all_in.is_set()

        monkeypatch.setattr(scheduler, "schedule", noted)
        with ThreadPoolExecutor(3) as pool, steps_held(engine, some_missing):
            done = [pool.submit(completed, server, name, PROMPT + name, 12) for name in NAMES]
            assert all(one.result() for one in done)
        assert max(together) == 3


def test_memory_of_one_is_not_used_for_another(tiny: Path, library: Library) -> None:
    with serving(tiny) as (_, server):
        prompt = PROMPT * 4

        def cached(model: str) -> int:
            found = post(server, "/v1/completions", model=model, prompt=prompt, max_tokens=1).json()
            return found["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert [cached(name) for name in NAMES] == [0, 0, 0]
        assert all(cached(name) > 0 for name in NAMES)


def test_each_name_is_unloaded_by_itself_and_the_engine_with_the_last_one(tiny: Path, library: Library) -> None:
    with serving(tiny) as (host, server):
        for name in NAMES:
            completed(server, name)
        engine, found = engine_of(host), loaded(server)
        assert set(found) == set(NAMES)
        whole = found["base"]["size"]
        own = {name: library_bytes(library, name) for name in NAMES}
        assert {name: one["size"] - whole for name, one in found.items()} == own
        assert {one["shared_size"] for one in found.values()} == {whole}
        assert host.bytes == sum(one.size for one in host.engines()) + sum(own.values())
        for name, left in (("poet", {"base", "pirate"}), ("base", {"pirate"})):
            assert post(server, "/api/generate", model=name, keep_alive=0).json()["done_reason"] == "unload"
            assert comes(lambda left=left: set(loaded(server)) == left)
            assert engine_of(host) is engine
        assert comes(lambda: [info.name.partition("@")[0] for info in engine.adapters.list()] == ["pirate"])
        assert comes(lambda: engine.stats().adapter_bytes <= own["pirate"])
        assert comes(lambda: loaded(server)["pirate"]["shared_size"] == 0)
        completed(server, "poet")
        assert engine_of(host) is engine
        for name in ("poet", "pirate"):
            post(server, "/api/generate", model=name, keep_alive=0)
        assert comes(lambda: len(host.engines()) == 1)
        assert not engine.healthy
        host.check()


def library_bytes(library: Library, name: str) -> int:
    """What is reserved for the adapters of a model."""
    return sum(2 * file.size for part in library.manifest(name).adapters for file in part.files)


def streamed(server: Server, model: str) -> list[str]:
    """The texts of a stream."""
    body = {"model": model, "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=PATIENCE) as response:
        assert response.status_code == 200, response.read()
        data = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert data.pop() == "[DONE]"
    return [choice["text"] for chunk in data for choice in json.loads(chunk)["choices"]]


def test_a_model_is_replaced_while_its_requests_and_those_of_others_run(
    tiny: Path, library: Library, adapters: dict[str, Path]
) -> None:
    with serving(tiny) as (host, server):
        before, old, other = completed(server, "poet"), streamed(server, "poet"), streamed(server, "pirate")
        engine, running = engine_of(host), threading.Event()

        def both_run(requests: list[Request]) -> bool:
            """Whether two requests have begun, and their text, or that one of them is missing."""
            produced = [one.sampler.produced for request in requests for one in request.completions]
            if len(produced) == 2 and min(produced) > 0:
                running.set()
            return running.is_set() or len(produced) < 2

        with ThreadPoolExecutor(3) as pool:
            with steps_held(engine, both_run):
                streams = [pool.submit(streamed, server, name) for name in ("poet", "pirate")]
                assert running.wait(PATIENCE)
                made(library, "poet", f"FROM {tiny}\nADAPTER {adapters['c']}", tiny.parent, tools=Tools())
                new = pool.submit(completed, server, "poet")
                assert comes(lambda: len(engine.adapters.list()) == 3), "the old one is not in use"
                assert not any(one.done() for one in streams)
            after = new.result()
            assert after != before
            assert ["".join(one.result()) for one in streams] == ["".join(old), "".join(other)]
        assert comes(lambda: len(engine.adapters.list()) == 2)
        assert completed(server, "poet") == after == alone("poet")[0]
        assert set(loaded(server)) == {"poet", "pirate"}
        host.check()
        engine.check()


def test_an_adapter_that_does_not_fit_is_refused_by_name_and_others_run(
    tiny: Path, library: Library, adapters: dict[str, Path], tmp_path: Path
) -> None:
    other = saved(tmp_path / "other", dict.fromkeys(projections(load(tiny, device="cpu").model), (7, 9)))
    with pytest.raises(Exception, match=r"ADAPTER .*other.* cannot be used"):
        made(library, "bad", f"FROM base\nADAPTER {other}", tiny.parent, tools=Tools())
    made(library, "bad", f"FROM base\nADAPTER {other}", tiny.parent, tools=FakeAdapters())
    with serving(tiny) as (host, server):
        text = completed(server, "poet")
        bytes_before = host.bytes
        found = post(server, "/v1/completions", model="bad", prompt=PROMPT)
        assert (found.status_code, found.json()["error"]["code"]) == (400, "model_refused")
        assert "the model bad cannot be loaded" in found.json()["error"]["message"]
        assert str(library.root) not in found.text
        assert host.bytes == bytes_before
        assert completed(server, "poet") == text
        assert len(engine_of(host).adapters.list()) == 1


class FakeAdapters(FakeTools):
    """Does not look at adapters."""

    def check_adapter(self, directory: Path, adapter: Path) -> None:
        return


def test_models_of_the_command_line_share_an_engine_with_those_of_the_library(
    tiny: Path, library: Library, wanted: dict[str, tuple[str, tuple[str, int]]]
) -> None:
    texts = {name: text for name, (text, _) in wanted.items()}
    with hosted(("poet", "base"), **OPTIONS) as (host, *_), Server(host, ServeSettings(port=0)) as server:
        assert host.names == ["poet", "base"]
        assert {name: completed(server, name) for name in NAMES} == texts
        assert len(host.engines()) == 1
        assert {one.key[0]: one.fixed for one in host.models()} == {
            "poet": True, "base": True, "pirate": False,
        }  # fmt: skip
        assert host.default.adapter == host.loaded("poet").engine.adapter != ""
    with (
        hosted(("base",), **(OPTIONS | {"draft": "ngram"})) as (host, *_),
        Server(host, ServeSettings(port=0)) as server,
    ):
        assert completed(server, "pirate") == texts["pirate"]
        assert len(host.engines()) == 2, "its engine has other settings"


def test_the_adapters_of_models_that_wait_are_added_when_the_engine_is_there(
    tiny: Path, library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on, names = threading.Event(), threading.Event(), list[str]()
    load_engine = Engines.on_demand

    def held(self: Engines, name: str, *args: Any) -> Engine:
        names.append(name)
        begun.set()
        assert go_on.wait(PATIENCE)
        return load_engine(self, name, *args)

    monkeypatch.setattr(Engines, "on_demand", held)
    with serving(tiny) as (host, server), ThreadPoolExecutor(3) as pool:
        first = pool.submit(completed, server, "poet")
        assert begun.wait(PATIENCE)
        others = [pool.submit(completed, server, name) for name in ("pirate", "base")]
        assert comes(lambda: len(host._wanted) == 3)
        go_on.set()
        assert len({one.result() for one in (first, *others)}) == 3
        assert names == ["poet:latest"]
