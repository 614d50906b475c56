"""Whatever becomes of a request, it is told its end once, and everything it held is free again."""

import gc
import logging
import random
import re
from collections import Counter
from collections.abc import Callable
from itertools import count
from types import FunctionType, ModuleType
from typing import Any

import pytest
import torch

from kvcellar import Engine, EngineFailed
from kvcellar.engine.core.request import Completion, Request
from kvcellar.errors import BadRequest, NoToken
from kvcellar.events import Delta, Event
from kvcellar.frontend.engine import Ticket
from kvcellar.progress import rounded
from kvcellar.sampling_params import SamplingParams
from tests.engine.mixes import Ear, assert_at_rest, bytes_for, small_engine, tokens
from tests.small_process import in_small_process
from tests.zoo import ARCHS, layers

CELLS = 60


def tiny_engine(**settings: Any) -> Engine:
    """Two layers, one of them with a window, and memory for hardly more than one request."""
    model = ARCHS["ministral"].build(num_hidden_layers=2, layer_types=layers("SF"))
    given = {"max_sequences": 8, "step_tokens": 16, "threads": 1} | settings
    return Engine(model, **{"cache_bytes": bytes_for(model, CELLS, **given)} | given)


def checked_between_steps(engine: Engine) -> None:
    """From now on the engine asserts its invariants after every turn."""
    turn = engine._loop._step

    def turn_and_check() -> None:
        turn()
        engine._loop.check()

    engine._loop._step = turn_and_check  # type: ignore[method-assign]


class Listener(Ear):
    """An ear that does something with what it hears: cancels at a moment, or breaks."""

    def __init__(self, cancel_at: int | None, break_at: int | None) -> None:
        super().__init__()
        self.ticket: Ticket | None = None
        self.cancelled = False
        self._cancel_at, self._break_at = cancel_at, break_at
        self.broken = False

    def __call__(self, event: Event) -> None:
        assert not self.broken, "told something after it broke"
        super().__call__(event)
        if len(self.events) == self._break_at:
            self.broken = True
            raise ConnectionError("nobody listens any more")
        if len(self.events) == self._cancel_at:
            self.cancel()

    def cancel(self) -> None:
        assert self.ticket is not None
        self.cancelled = True
        self.ticket.cancel()


def faulty(forward: Callable[..., torch.Tensor]):
    """A forward that at times raises, twice in a row, for after the first time each sequence is tried alone. And at
    times it answers with a row that is no number. It counts its calls: nothing depends on which thread is when where.
    """
    calls, nans = count(1), 0

    def wrapped(*args: Any) -> torch.Tensor:
        nonlocal nans
        call = next(calls)
        if call % 60 in (0, 1) and call > 1:
            raise RuntimeError("the device has had enough")
        logits = forward(*args)
        nans += call % 60 == 30
        if nans and len(logits):  # a step in which nobody draws has none
            nans -= 1
            logits = logits.clone()
            logits[call % len(logits)] = torch.nan
        return logits

    return wrapped


def live(engine: Engine, draw: random.Random, count: int) -> list[Listener]:
    """Submit requests of all kinds, in bursts; a third of them is cancelled, at any moment of their life."""
    ears = []
    for _ in range(count):
        kind = draw.choice(["cancelled", "cancelled", "broken", *["left alone"] * 3])
        moment = draw.randint(1, 12)
        ear = Listener(moment if kind == "cancelled" else None, moment if kind == "broken" else None)
        params = SamplingParams(
            max_tokens=draw.randint(1, 10),
            n=draw.choice([1, 1, 1, 2, 3]),
            temperature=draw.choice([0.0, 1.0]),
            seed=draw.randrange(1000),
            ignore_eos=draw.random() < 0.3,
        )
        when = draw.choice(["before it is taken in", "later", "later", "later"])
        # The ticket is there before the first event: the engine's thread is busy with this call until then.
        prompt = tokens(draw, draw.choice([1, 2, 5, 17, 33]))
        submit(engine, prompt, params, ear)
        if kind == "cancelled" and when != "later":
            ear.cancel()
        ears.append(ear)
        if draw.random() < 0.02:
            ear.wait() if not ear._break_at else engine.stats()
    return ears


def submit(engine: Engine, prompt: tuple[int, ...], params: SamplingParams, ear: Listener) -> None:
    engine._loop.call(lambda: setattr(ear, "ticket", engine.submit(prompt, params, deliver=ear)))


@pytest.fixture(autouse=True)
def no_log(monkeypatch):
    """Log records hold on to tracebacks, and those to requests."""
    monkeypatch.setattr(logging.getLogger("kvcellar.engine"), "disabled", True)


@pytest.mark.parametrize("count", [300, *(pytest.param(count, marks=pytest.mark.slow) for count in (1000, 20_000))])
def test_after_requests_of_all_fates_all_cells_are_free(count):
    draw = random.Random(count)
    with tiny_engine(max_waiting=10**6) as engine:
        checked_between_steps(engine)
        guest = engine._built.guest
        guest.forward = faulty(guest.forward)
        ears = live(engine, draw, count)
        for ear in ears:
            if ear._break_at is None:
                ear.wait()
        while (stats := engine.stats()).running or stats.waiting:  # those that broke are told no end
            pass
        for ear in ears[:: max(1, count // 50)]:
            if ear.cancelled:
                ear.cancel()
        assert engine.stats().preemptions > 0
        assert_at_rest(engine)
        assert_bytes_are_those_held(engine)
        assert engine.healthy

    ends = Counter("broken" if ear.broken else kind_of_end(ear) for ear in ears)
    assert set(ends) == {"stop", "length", "cancelled", "EngineFailed", "ScoresNotNumbers", "broken"}
    assert ends["cancelled"] > count / 10
    for ear in ears:
        ear.ticket = None
    gc.collect()
    assert not [thing for thing in gc.get_objects() if type(thing) in (Completion, Request)]


def kind_of_end(ear: Ear) -> str:
    if ear.error is not None:
        assert isinstance(ear.error, EngineFailed | NoToken)
        return type(ear.error).__name__
    reasons = set(ear.reasons.values())
    assert len(ear.reasons) >= 1
    return "cancelled" if "cancelled" in reasons else min(reasons)


def assert_bytes_are_those_held(engine: Engine) -> None:
    stats = engine.stats()
    assert stats.cache_bytes == sum(group.bytes for group in stats.groups) + stats.state_bytes
    memory = engine._built.memory
    tables = tensor_bytes([memory.tables, *(store.step.tables for store in memory.storage.stores)])
    assert stats.cache_bytes == tensor_bytes(memory) - tables
    assert tables <= stats.scratch_bytes, "step tables, which stay between steps, take more than was set aside"
    assert stats.limit_bytes == engine._built.settings.cache_bytes == engine._built.memory.storage.max_bytes
    assert stats.cache_bytes + stats.scratch_bytes + stats.staging_bytes <= stats.limit_bytes
    assert (stats.scratch_bytes, stats.staging_bytes) == (
        engine._built.memory.storage.scratch,
        engine._built.memory.storage.staging,
    )
    first, _, *parts = engine.capacity().splitlines()
    allocated = stats.cache_bytes + stats.scratch_bytes + stats.staging_bytes
    sizes = (stats.cache_bytes, stats.scratch_bytes, stats.staging_bytes, allocated, stats.limit_bytes)
    planes, scratch, staging, total, limit = map(rounded, sizes)
    sums = f"in {planes}; with {scratch} for a step and {staging} for edits {total} of {limit}"
    assert re.fullmatch(rf"\d+ (?:tokens|sequences of any length) {re.escape(sums)}", first)
    each = [f"  {group.name}: {group.cells} cells in {rounded(group.bytes)}" for group in stats.groups]
    assert parts[: len(each)] == each
    assert max(map(len, engine.capacity().splitlines())) <= 120


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        *(
            (name, kind)
            for name in ("gemma3", "deepseek-v3", "bloom", "lfm3")
            for kind in (None, "int8", "k=fp8,v=int4")
        ),
        ("mamba2", None),
    ],
)
def test_the_bytes_that_are_reported_are_those_that_are_held(name, kv_dtype):
    with small_engine(name, kv_dtype=kv_dtype, cache_bytes=8_000_000, step_tokens=32) as engine:
        assert_bytes_are_those_held(engine)
        engine.generate([[5, 6], [7] * 20], max_tokens=5)
        assert_bytes_are_those_held(engine)


def test_what_stores_no_keys_and_values_cannot_store_them_otherwise():
    with pytest.raises(BadRequest, match="no attention layers"):
        small_engine("mamba2", kv_dtype="int8")


def tensor_bytes(thing: object) -> int:
    """Bytes of every tensor that can be reached from `thing`, each storage once."""
    seen: dict[int, object] = {}
    storages: dict[int, int] = {}
    waiting = [thing]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | FunctionType | torch.nn.Module):
            continue
        seen[id(one)] = one
        if isinstance(one, torch.Tensor):
            storages[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
        else:
            waiting += gc.get_referents(one)
    return sum(storages.values())


def test_one_that_breaks_hears_nothing_more_and_takes_nobody_along():
    with tiny_engine() as engine:
        ears = [Listener(None, break_at) for break_at in (1, None, 3, None)]
        for ear in ears:
            submit(engine, (5, 6, 7), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), ear)
        whole = [ears[1].wait().ids(), ears[3].wait().ids()]
        assert whole[0] == whole[1] == engine.generate([5, 6, 7], max_tokens=8, ignore_eos=True).token_ids
        assert [len(ears[0].events), len(ears[2].events)] == [1, 3]
        assert_at_rest(engine)


def test_a_broken_listener_gives_its_cells_back_at_once():
    with tiny_engine() as engine:
        ear = Listener(None, 2)
        submit(engine, (5, 6, 7), SamplingParams(max_tokens=40, n=2, ignore_eos=True, temperature=0.0), ear)
        seen = engine.generate([9, 8], max_tokens=6, ignore_eos=True)
        assert len(seen.token_ids) == 6
        assert_at_rest(engine)
        assert len([event for event in ear.events if isinstance(event, Delta)]) == 2


def test_what_a_request_held_is_not_in_cycles_when_it_is_done() -> None:
    """So that no collection of the process of an engine has to look at all that is in memory."""
    in_small_process(_leave_no_cycles, "ministral", "lfm2", "mamba2")


def refuse() -> None:
    raise BadRequest("refused", "prompt")


def _leave_no_cycles(*names: str) -> None:
    for name in names:
        _leaves_no_cycles(name)


def _leaves_no_cycles(name: str) -> None:
    kinds: list[dict[str, Any]] = [
        {},
        {"n": 3},
        {"logprobs": 2},
        {"temperature": 0.7, "seed": 3},
        {"prompt_logprobs": 1},
    ]
    with Engine(ARCHS[name].build(), cache_bytes=4 << 20, max_sequences=4, step_tokens=16, threads=1) as engine:

        def use() -> None:
            for how in kinds:
                engine.generate(list(range(3, 40)), max_tokens=5, ignore_eos=True, **how)
            ear = Ear()
            engine.submit([5, 6, 7], engine.params(max_tokens=900), deliver=ear).cancel()
            ear.wait()
            with pytest.raises(BadRequest, match="refused"):
                engine._loop.call(refuse)
            with pytest.raises(BadRequest):
                engine.adapters.remove("none")
            engine.cache.picture()
            engine.cache.clear()

        use()
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        use()
        gc.collect()
    assert not Counter(type(one).__qualname__ for one in gc.garbage), name
    gc.set_debug(0)
    gc.enable()
