"""Requests with adapters: each gets the text of merged weights, and nothing that another adapter has computed."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

from kvcellar import Engine, RetentionOptions
from kvcellar.engine.core.loop import Loop
from kvcellar.engine.models.hf_globals import silence_transformers
from kvcellar.errors import AdapterRefused, BadRequest
from kvcellar.frontend.result import Collector
from kvcellar.memory import restore_plan
from kvcellar.memory.restore_plan import Planner
from tests.engine.tiered import acknowledged
from tests.models.lora import ends_with, layers_of, merged, saved
from tests.own_cache import own_cache
from tests.zoo import ARCHS, reference_logits

TARGETS: Mapping[str, tuple[str, ...]] = {
    "llama": ("q_proj", "v_proj", "down_proj"),
    "lfm2": ("in_proj", "out_proj", "q_proj", "w1"),
    "qwen3-moe": ("q_proj", "o_proj"),
    "falcon": ("query_key_value", "dense"),
}
PLAIN = {"temperature": 0.0, "ignore_eos": True}
PROMPT = [*range(20, 50)]
SMALL = 1 << 22  # bytes of a cache


@pytest.fixture(scope="module")
def llama() -> PreTrainedModel:
    return ARCHS["llama"].build()


def adapter(model: PreTrainedModel, path: Path, name: str = "llama", **fields: Any) -> Path:
    targets = TARGETS[name]
    return saved(path, layers_of(model, ends_with(*targets)), **{"target_modules": list(targets)} | fields)


def check_greedy(
    found: Sequence[int], model: PreTrainedModel, prompt: Sequence[int], n: int, *, within: float = 1e-4
) -> None:
    """Each of the `n` tokens is the most likely one after those before it, or nearly as likely."""
    assert len(found) == n
    logits = reference_logits(model, [*prompt, *found])[len(prompt) - 1 : -1]
    gaps = logits.amax(-1) - logits[torch.arange(n), torch.tensor(found)]
    assert float(gaps.max()) <= within * max(1.0, float(logits.abs().max())), gaps


def text(engine: Engine, prompt: Sequence[int], n: int = 6, **options: Any) -> tuple[int, ...]:
    return engine.generate(prompt, max_tokens=n, **PLAIN | options).token_ids


@contextmanager
def held(engine: Engine) -> Iterator[None]:
    """Requests that are submitted within the block begin together, after it."""
    gate = threading.Event()
    engine._loop.post(lambda: gate.wait() and None)
    try:
        yield
    finally:
        gate.set()


def running(engine: Engine, prompt: Sequence[int], n: int, **how: Any) -> Collector:
    collector = Collector(1)
    engine.submit(prompt, engine.params(max_tokens=n, **PLAIN), deliver=collector.deliver, **how)
    return collector


@pytest.mark.parametrize("name", TARGETS)
def test_two_adapters_and_none_in_one_batch_have_the_texts_of_merged_weights(name: str, tmp_path: Path) -> None:
    model = ARCHS[name].build()
    one, two = (
        adapter(model, tmp_path / "1", name, seed=1),
        adapter(model, tmp_path / "2", name, seed=2, use_rslora=True),
    )
    networks = {"": model, "one": merged(model, one), "two": merged(model, two)}
    prompts = {"": PROMPT[:9], "one": PROMPT[:12], "two": PROMPT[:7]}
    with Engine(model, adapters={"one": one, "two": str(two)}, cache_bytes=1 << 26, step_tokens=16) as engine:
        with held(engine):
            together = {use: running(engine, prompt, 8, adapter=use) for use, prompt in prompts.items()}
        for use, found in together.items():
            check_greedy(found.result().token_ids, networks[use], prompts[use], 8)
        several = engine.generate(prompts["one"], max_tokens=8, adapter="one", n=2, **PLAIN)
        for choice in several.choices:
            check_greedy(choice.token_ids, networks["one"], prompts["one"], 8)
        engine.check()


def test_memory_of_one_adapter_is_not_used_with_another(llama: PreTrainedModel, tmp_path: Path) -> None:
    one, two = adapter(llama, tmp_path / "1", seed=1), adapter(llama, tmp_path / "2", seed=2)
    prompt = [3 + i % 90 for i in range(80)]
    with Engine(llama, adapters={"one": one, "two": two}) as engine:
        for use in ("one", "two", "one", "", "two", ""):
            result = engine.generate(prompt, max_tokens=1, adapter=use, **PLAIN)
            assert result.recall is not None
            if use in (seen := engine.__dict__.setdefault("_seen", set())):
                assert result.usage.cached_tokens == 79
                assert result.recall.reason == "all"
            else:
                assert result.usage.cached_tokens == 0
                assert result.recall.reason == ("other adapter" if seen else "new")
            seen.add(use)
        listed = {one["adapter"] for one in engine.cache.listed("device")}
        assert listed == {"", *(info.digest for info in engine.adapters.list())}
        engine.check()


def test_a_new_adapter_of_a_name_replaces_the_old_one_for_later_requests(
    llama: PreTrainedModel, tmp_path: Path
) -> None:
    old, new = adapter(llama, tmp_path / "1", seed=1), adapter(llama, tmp_path / "2", seed=2)
    with Engine(llama, adapters={"style": old}) as engine:
        size = engine.stats().adapter_bytes
        check_greedy(text(engine, PROMPT, adapter="style"), merged(llama, old), PROMPT, 6)
        runs = running(engine, PROMPT, 40, adapter="style")
        info = engine.adapters.add("style", new)
        again = engine.generate(PROMPT, max_tokens=6, adapter="style", **PLAIN)
        assert again.usage.cached_tokens == 0
        check_greedy(again.token_ids, merged(llama, new), PROMPT, 6)
        check_greedy(runs.result().token_ids, merged(llama, old), PROMPT, 40)
        engine.check()
        assert engine.stats().adapter_bytes == info.bytes == size, "the old one is freed"
        engine.adapters.add("style", old)
        assert engine.generate(PROMPT, max_tokens=1, adapter="style", **PLAIN).usage.cached_tokens == len(PROMPT) - 1


def test_an_adapter_is_removed_when_no_request_uses_it(llama: PreTrainedModel, tmp_path: Path) -> None:
    path = adapter(llama, tmp_path / "1")
    with Engine(llama) as engine:
        assert "adapters" not in engine.capacity()
        engine.adapters.add("style", [path])
        assert f"adapters: {engine.stats().adapter_bytes} of {1 << 30} bytes" in engine.capacity()
        runs = running(engine, PROMPT, 40, adapter="style")
        engine.adapters.remove("style")
        assert engine.adapters.list() == []
        with pytest.raises(BadRequest, match="there is no adapter 'style'; there are none"):
            text(engine, PROMPT, adapter="style")
        with pytest.raises(BadRequest, match="there is no adapter"):
            engine.adapters.remove("style")
        check_greedy(runs.result().token_ids, merged(llama, path), PROMPT, 40)
        engine.check()
        assert engine.stats().adapter_bytes == 0
        check_greedy(text(engine, PROMPT), llama, PROMPT, 6)


def test_the_default_adapter_is_that_of_requests_that_name_none(llama: PreTrainedModel, tmp_path: Path) -> None:
    path = adapter(llama, tmp_path / "1")
    with Engine(llama, adapters={"style": path}, adapter="style") as engine:
        check_greedy(text(engine, PROMPT), merged(llama, path), PROMPT, 6)
        check_greedy(text(engine, PROMPT, adapter=""), llama, PROMPT, 6)
    with pytest.raises(BadRequest, match="there is no adapter 'other'"):
        Engine(llama, adapters={"style": path}, adapter="other")


def test_several_directories_of_a_name_are_added_up(llama: PreTrainedModel, tmp_path: Path) -> None:
    one, two = adapter(llama, tmp_path / "1", seed=1), adapter(llama, tmp_path / "2", seed=2, r=3)
    with Engine(llama, adapters={"both": [one, two]}) as engine:
        check_greedy(text(engine, PROMPT, adapter="both"), merged(llama, one, two), PROMPT, 6)


# -- memory ------------------------------------------------------------------------------------------------------------


def test_preempted_requests_go_on_with_their_adapter(llama: PreTrainedModel, tmp_path: Path) -> None:
    one, two = adapter(llama, tmp_path / "1", seed=1), adapter(llama, tmp_path / "2", seed=2)
    networks = {"one": merged(llama, one), "two": merged(llama, two), "": llama}
    with Engine(llama, adapters={"one": one, "two": two}, cache_bytes=600_000, step_tokens=32) as engine:
        with held(engine):
            runs = {use: running(engine, [*PROMPT, *PROMPT], 60, adapter=use) for use in networks}
        for use, found in runs.items():
            check_greedy(found.result().token_ids, networks[use], [*PROMPT, *PROMPT], 60)
        assert engine.stats().preemptions > 0
        engine.check()


def test_what_an_adapter_computed_is_read_back_after_a_restart_with_it_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However fast this machine computes it again."""
    monkeypatch.setattr(Planner, "speed", lambda self: None)
    monkeypatch.setattr(restore_plan, "SHORTEST", restore_plan.LONGEST)
    own_cache(monkeypatch, tmp_path / "cache")
    model = ARCHS["lfm2"].build()
    with silence_transformers():
        model.save_pretrained(tmp_path / "m")
    one, two = adapter(model, tmp_path / "1", "lfm2", seed=1), adapter(model, tmp_path / "2", "lfm2", seed=2)
    prompt = [3 + i % 90 for i in range(100)]
    options: dict[str, Any] = {"store": str(tmp_path / "store"), "host_bytes": 0, "cache_bytes": 1 << 25, "threads": 1}
    with Engine(tmp_path / "m", adapters={"style": one}, **options) as engine:
        expected = text(engine, prompt, adapter="style")
        acknowledged(engine)
    with Engine(tmp_path / "m", adapters={"renamed": one, "style": two}, **options) as engine:
        entries = list(engine.cache.listed("disk"))
        digests = {info.name: info.digest for info in engine.adapters.list()}
        assert {entry["adapter"] for entry in entries} == {digests["renamed"]}
        for use, cached in (("style", 0), ("", 0), ("renamed", 99)):
            result = engine.generate(prompt, max_tokens=6, adapter=use, **PLAIN)
            assert result.usage.cached_tokens == cached, use
        assert result.token_ids == expected
        check_greedy(expected, merged(model, one), prompt, 6)
        engine.check()


def test_what_is_removed_of_a_namespace_includes_what_adapters_computed(llama: PreTrainedModel, tmp_path: Path) -> None:
    with Engine(llama, adapters={"style": adapter(llama, tmp_path / "1")}, draft="ngram") as engine:
        for use in ("style", ""):
            running(engine, PROMPT, 4, adapter=use, namespace="tenant").result()
            running(engine, PROMPT, 4, adapter=use, namespace="other").result()
        (tenant,) = [one for one in engine.cache.namespaces() if one.namespace == "tenant"]
        assert tenant.entries == 2
        assert engine.cache.remove(namespace="tenant").tokens == tenant.tokens
        assert {one.namespace for one in engine.cache.namespaces()} == {"other"}
        for own in ("\0adapter:x", "\0image:x"):
            with pytest.raises(BadRequest, match="a namespace cannot begin with"):
                running(engine, PROMPT, 4, namespace=own)


def test_pins_are_for_requests_with_the_adapter(llama: PreTrainedModel, tmp_path: Path) -> None:
    with Engine(llama, adapters={"style": adapter(llama, tmp_path / "1")}) as engine:
        engine.pin(PROMPT, adapter="style")
        for use, cached in (("style", 30), ("", 0)):
            found = running(engine, [*PROMPT, 5, 6], 1, adapter=use, namespace="tenant").result()
            assert found.usage.cached_tokens == cached
        engine.check()


def test_sessions_their_forks_and_saved_conversations_keep_the_adapter(llama: PreTrainedModel, tmp_path: Path) -> None:
    path = adapter(llama, tmp_path / "1")
    network = merged(llama, path)
    with Engine(llama, adapters={"style": path}) as engine:
        session = engine.session(chat=False, adapter="style")
        answer = session.send(PROMPT, max_tokens=4, **PLAIN).token_ids
        check_greedy(answer, network, PROMPT, 4)
        before = [*session.tokens, 9]
        session.save("kept")
        for one in (session.fork(), engine.load("kept"), session):
            found = one.send([9], max_tokens=4, **PLAIN)
            check_greedy(found.token_ids, network, before, 4)
            assert found.usage.cached_tokens >= len(before) - 2
        engine.adapters.remove("style")
        with pytest.raises(BadRequest, match="there is no adapter 'style'"):
            session.send([9], max_tokens=4, **PLAIN)


@pytest.mark.parametrize("draft", ["ngram", "model"])
def test_drafts_do_not_change_texts_with_adapters(draft: str, tmp_path: Path) -> None:
    model, small = ARCHS["llama"].build(), ARCHS["llama"].build(num_hidden_layers=1)
    path = adapter(model, tmp_path / "1")
    network, prompt = merged(model, path), [5, 6, 7, 8] * 6
    drafter: Any = draft if draft == "ngram" else small
    with Engine(model, adapters={"style": path}, draft=drafter) as engine:
        for _ in range(2):
            runs = {use: running(engine, prompt, 20, adapter=use) for use in ("style", "")}
            check_greedy(runs["style"].result().token_ids, network, prompt, 20)
            check_greedy(runs[""].result().token_ids, model, prompt, 20)
        engine.check()


def test_quantised_cells_are_those_of_the_adapter(llama: PreTrainedModel, tmp_path: Path) -> None:
    path = adapter(llama, tmp_path / "1")
    with Engine(llama, adapters={"style": path}, kv_dtype="int8") as engine:
        check_greedy(text(engine, PROMPT, adapter="style"), merged(llama, path), PROMPT, 6, within=0.05)
        engine.check()


# -- refusals and failures ---------------------------------------------------------------------------------------------


def test_an_adapter_is_tested_by_one_forward_in_each_turn_and_others_run_meanwhile(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    turns, turn = list[list[int]](), Loop.turn

    def counted(loop: Loop) -> float | None:
        turns.append([])
        return turn(loop)

    path = adapter(llama, tmp_path / "a")
    with Engine(llama, cache_bytes=SMALL) as engine:
        alone = text(engine, PROMPT, 60)
        network = engine._built.adapters._guest.model
        hook = network.register_forward_pre_hook(
            lambda _module, _args, given: turns[-1].append(given["input_ids"].numel()), with_kwargs=True
        )
        monkeypatch.setattr(Loop, "turn", counted)
        with held(engine):
            stream = running(engine, [*PROMPT, 1], 60)
            adding = threading.Thread(target=engine.adapters.add, args=("a", path))
            adding.start()
        adding.join(120)
        assert len(stream.result().token_ids) == 60
        hook.remove()
        engine.check()
        assert text(engine, PROMPT, 60) == alone
        check_greedy(text(engine, PROMPT, adapter="a"), merged(llama, path), PROMPT, 6)
    tests = sum(1 for one in turns for tokens in one if tokens in (4, 6))  # by the network's own attention
    assert tests == 2
    assert max(map(len, turns)) <= 2  # a forward of the test, and one of a step


def test_an_adapter_that_does_not_fit_leaves_nothing(llama: PreTrainedModel, tmp_path: Path) -> None:
    good, bad = adapter(llama, tmp_path / "good"), adapter(llama, tmp_path / "bad", rank=2)
    with pytest.raises(AdapterRefused, match="the adapter bad cannot be used"):
        Engine(llama, adapters={"x": bad})
    with Engine(llama, adapters={"x": good}, adapter_bytes=40_000) as engine:
        before = engine.stats().adapter_bytes
        for name, path, reason in (
            ("x", bad, "is expected"),
            ("y", tmp_path / "nowhere", "has no adapter_config.json"),
            ("y", good, r"it takes \d+ bytes, and \d+ are left for it. Raise adapter_bytes"),
        ):
            with pytest.raises(AdapterRefused, match=reason):
                engine.adapters.add(name, path)
            assert [info.name for info in engine.adapters.list()] == ["x"]
            assert engine.stats().adapter_bytes == before
            engine.check()
        check_greedy(text(engine, PROMPT, adapter="x"), merged(llama, good), PROMPT, 6)


@pytest.mark.parametrize("name", ["", "a\n", "x" * 257, 3, None])
def test_names_that_are_none_are_refused(llama: PreTrainedModel, tmp_path: Path, name: Any) -> None:
    with Engine(llama) as engine, pytest.raises(BadRequest, match="the name of an adapter has"):
        engine.adapters.add(name, tmp_path)


@pytest.mark.parametrize("path", [None, [], 3, [None], ""])
def test_places_that_are_none_are_refused(llama: PreTrainedModel, path: Any) -> None:
    with Engine(llama) as engine, pytest.raises(BadRequest, match="an adapter is a directory, or a list of some"):
        engine.adapters.add("x", path)


@pytest.mark.parametrize("use", ["other", 3, ["x"]])
def test_requests_with_an_unknown_adapter_are_refused(llama: PreTrainedModel, use: Any) -> None:
    with Engine(llama) as engine:
        with pytest.raises(BadRequest, match="there is no adapter"):
            text(engine, PROMPT, adapter=use)
        engine.check()
        assert engine._built.intake.prompts.taken == 0


def test_weights_that_overflow_are_refused_when_they_are_tested(llama: PreTrainedModel, tmp_path: Path) -> None:
    path = adapter(llama, tmp_path / "a")
    file = path / "adapter_model.safetensors"
    save_file({name: values * 1e25 for name, values in load_file(file).items()}, file)
    with Engine(llama) as engine:
        with pytest.raises(AdapterRefused, match="with it, logits are not finite"):
            engine.adapters.add("x", path)
        assert engine.stats().adapter_bytes == 0
        engine.check()
        check_greedy(text(engine, PROMPT), llama, PROMPT, 6)


def test_a_step_that_fails_in_a_layer_with_an_adapter_ends_its_request_only(
    llama: PreTrainedModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = adapter(llama, tmp_path / "1")

    def broken(*_: Any) -> torch.Tensor:
        raise RuntimeError("out of order")

    with Engine(llama, adapters={"style": path}) as engine:
        monkeypatch.setattr("kvcellar.engine.models.adapters.adapted._product", broken)
        runs = {use: running(engine, PROMPT, 6, adapter=use) for use in ("style", "")}
        check_greedy(runs[""].result().token_ids, llama, PROMPT, 6)
        with pytest.raises(Exception, match="out of order"):
            runs["style"].result()
        monkeypatch.undo()
        engine.check()
        assert engine.adapters.list()[0].requests == 0
        check_greedy(text(engine, PROMPT, adapter="style"), merged(llama, path), PROMPT, 6)


def test_requests_that_are_cancelled_give_their_adapter_back(llama: PreTrainedModel, tmp_path: Path) -> None:
    path = adapter(llama, tmp_path / "1")
    with Engine(llama, adapters={"style": path}) as engine:
        begun, collector, used = threading.Event(), Collector(1), list[int]()

        def deliver(event: Any) -> None:
            used.append(engine.adapters.list()[0].requests)
            begun.set()
            collector.deliver(event)

        params = engine.params(max_tokens=200, **PLAIN)
        ticket = engine.submit(PROMPT, params, deliver=deliver, adapter="style", retention=RetentionOptions())
        begun.wait()
        ticket.cancel()
        collector.result()
        assert used[0] == 1
        engine.adapters.remove("style")
        engine.check()
        assert engine.stats().adapter_bytes == 0
