"""How long an engine keeps what requests compute: TTL, pins and quotas, on every kind of layer."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from kvcellar import BadRequest, Engine, RetentionOptions
from kvcellar.frontend.result import Collector
from tests.engine.mixes import assert_at_rest, bytes_for, small_engine, tokens

KINDS = ["llama", "gemma3", "llama4", "lfm2"]  # full, sliding, chunked, hybrid
GREEDY = {"max_tokens": 4, "temperature": 0.0, "ignore_eos": True}


def ask(engine: Engine, prompt: Sequence[int], namespace: str = "", **options: object):
    """The answer to a prompt whose tokens are kept in this way."""
    collector, params = Collector(1), engine.params(**GREEDY)
    retention = RetentionOptions(**options)
    engine.submit(prompt, params, deliver=collector.deliver, namespace=namespace, retention=retention)
    return collector.result()


def read(engine: Engine, prompt: Sequence[int], namespace: str = "", **options: object) -> int:
    """How many tokens of a prompt were computed."""
    usage = ask(engine, prompt, namespace, **options).usage
    return usage.prompt_tokens - usage.cached_tokens


class Clock:
    """The wall clock of an engine."""

    def __init__(self, engine: Engine) -> None:
        self.now = 1000.0
        prefixes = engine._loop.manager.prefixes
        prefixes._clock = prefixes.tree._now = lambda: self.now


@pytest.mark.parametrize("name", KINDS)
def test_what_a_request_computes_is_found_until_its_time_after_the_last_use(name) -> None:
    prompt = tokens(random.Random(name), 40)
    with small_engine(name) as engine:
        clock = Clock(engine)
        assert read(engine, prompt, ttl=10) == 40
        clock.now += 9
        assert read(engine, prompt, ttl=10) == 1
        clock.now += 9
        assert read(engine, prompt, ttl=5) == 1, "it was used again"
        clock.now += 9
        assert read(engine, prompt, ttl=1) == 40
        clock.now += 2
        read(engine, [5], ttl=1)  # any request removes what has expired
        assert max(group.cached for group in engine.stats().groups) <= 5
        assert read(engine, prompt) == 40
        clock.now += 1e9
        assert read(engine, prompt, ttl=1) == 1, "a request without a limit has used it, too"
        assert_at_rest(engine)


@pytest.mark.parametrize("name", KINDS)
def test_pinned_prompts_outlast_a_flood_and_are_found_by_every_namespace(name) -> None:
    draw = random.Random(name)
    prompt = tokens(draw, 60)
    with small_engine(name, cache_bytes=bytes_for(name, 240)) as engine:
        cold = ask(engine, [*prompt, 7], "cold").token_ids
        assert engine.pin(prompt).prompt_tokens == 60
        assert engine.stats().pinned == 60
        for number in range(12):
            read(engine, tokens(draw, 100), str(number))
        for namespace in ("", "a", "b"):
            warm = ask(engine, [*prompt, 7], namespace)
            assert warm.usage.cached_tokens == engine.stats().pinned
            assert warm.token_ids == cold
        assert_at_rest(engine)
        engine.clear_cache()
        assert (engine.stats().pinned, engine.stats().cells_cached) == (0, 0)


@pytest.mark.parametrize("name", KINDS)
def test_a_pin_of_one_namespace_is_not_found_by_others(name) -> None:
    prompt = tokens(random.Random(name), 40)
    with small_engine(name) as engine:
        engine.pin(prompt, namespace="a")
        assert read(engine, prompt, "b") == 40
        assert read(engine, prompt, "a") == 1


def test_a_pin_holds_a_share_of_the_cache_at_most_and_a_request_pins_nothing_beyond_it() -> None:
    draw = random.Random(0)
    with small_engine("llama", cache_bytes=bytes_for("llama", 200), pin_share=0.25) as engine:
        engine.pin(tokens(draw, 30))
        with pytest.raises(BadRequest, match="a prompt of 40 tokens cannot be pinned beside 30 tokens that are"):
            engine.pin(tokens(draw, 40))
        assert (engine.stats().pinned, engine.stats().pins_refused) == (30, 1)
        prompt = tokens(draw, 40)
        assert read(engine, prompt, pinned=True) == 40
        assert read(engine, prompt, pinned=True) == 1, "its tokens are cached like those of others"
        assert (engine.stats().pinned, engine.stats().pins_refused) == (30, 3)
    with small_engine("llama", pin_share=0) as engine, pytest.raises(BadRequest, match="cannot be pinned"):
        engine.pin([5, 6, 7])


def test_a_prompt_that_was_pinned_may_be_removed_before_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with small_engine("llama") as engine:
        result = engine._requests.result

        def then_cleared(*args: Any) -> Any:
            found = result(*args)
            engine.clear_cache()
            return found

        monkeypatch.setattr(engine._requests, "result", then_cleared)
        assert engine.pin([5, 6, 7]).prompt_tokens == 3
        assert engine.stats().pinned == 0


def test_a_request_that_waits_pins_nothing_yet() -> None:
    draw = random.Random(0)
    with small_engine("llama", cache_bytes=bytes_for("llama", 200), pin_share=0) as engine:
        prompt, running = tokens(draw, 150), Collector(1)
        read(engine, prompt[:30])
        params = engine.params(**GREEDY | {"max_tokens": 60})
        engine.submit(tokens(draw, 60), params, deliver=running.deliver)
        ask(engine, prompt, pinned=True)
        assert len(running.result().token_ids) == 60
        assert engine.stats().pins_refused == 1


@pytest.mark.parametrize("name", KINDS)
def test_a_request_that_runs_alone_gets_the_memory_of_pins(name) -> None:
    """Prompts that fit an empty memory are served, whatever is pinned."""
    draw = random.Random(name)
    with small_engine(name, cache_bytes=bytes_for(name, 200), pin_share=0.9) as engine:
        for _ in range(3):
            engine.pin(tokens(draw, 50))
        prompt = tokens(draw, 180)
        alone = ask(engine, prompt)
        assert alone.finish_reason == "length"
        assert len(alone.token_ids) == 4
        assert name != "llama" or engine.stats().pins_released > 0
        assert_at_rest(engine)


@pytest.mark.parametrize("name", KINDS)
def test_a_tenant_that_floods_leaves_others_what_is_within_their_quota(name) -> None:
    draw = random.Random(name)
    mine = [tokens(draw, 30) for _ in range(2)]
    with small_engine(name, cache_bytes=bytes_for(name, 400), tenant_share=0.3) as engine:
        for prompt in mine:
            read(engine, prompt, "b", owner="b")
        for _ in range(30):
            flood = tokens(draw, 60)
            for _ in range(2):
                read(engine, flood, "a", owner="a", priority=8)
        assert [read(engine, prompt, "b", owner="b") for prompt in mine] == [1, 1]
        assert_at_rest(engine)


def test_what_is_pinned_of_a_chat_is_what_all_that_begin_so_have_in_common() -> None:
    with Engine(dtype="float32", device="cpu", cache_bytes=64_000_000, threads=1) as engine:
        system = {"role": "system", "content": "You write short functions. " * 5}
        one, other = (engine.render([system, {"role": "user", "content": text}]) for text in ("def f", "class A"))
        pinned = engine.pin([system]).prompt_tokens
        assert one[:pinned] == other[:pinned]
        whole = [system, {"role": "user", "content": "def f"}]
        assert engine.pin(whole).prompt_tokens == len(one)
        assert engine.chat(whole, max_tokens=1).usage.cached_tokens == len(one) - 1
        with pytest.raises(BadRequest, match="content"):
            engine.pin([{"role": "system", "content": 5}])


@pytest.mark.parametrize(
    ("name", "value"),
    [("pin_share", 1.0), ("pin_share", -0.1), ("pin_share", None), ("tenant_share", 0), ("tenant_share", "1")],
)
def test_a_share_out_of_bounds_is_refused(name, value) -> None:
    with pytest.raises(BadRequest, match=f"^{name} must be a finite number from"):
        Engine(**{name: value})


def test_pinned_prompts_are_read_back_at_the_next_start_and_what_is_kept_in_memory_is_not(tmp_path) -> None:
    settings = {"dtype": "float32", "device": "cpu", "cache_bytes": 64_000_000, "threads": 1, "store": str(tmp_path)}
    with Engine(**settings) as engine:
        text, private = (engine.encode(line * 12) for line in ("def add(a, b):\n", "class Node:\n"))
        assert engine.pin(text).cached_tokens == 0
        read(engine, private, stored=False)
    with Engine(**settings) as engine:
        usage = engine.pin(text)
        assert usage.cached_tokens >= usage.prompt_tokens // 2
        assert engine.stats().pinned >= usage.prompt_tokens - 1
        assert read(engine, private) == len(private)
