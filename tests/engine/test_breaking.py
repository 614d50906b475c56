"""Whatever raises on the engine's thread, at whatever call: one request fails, and the others do not notice.

The network is replaced by a function of the tokens that memory shows it, in whole numbers: what a completion draws
depends on all that it may see, on nothing else, and on no rounding. A mix of requests is played again and again on one
engine, and each time something raises at one call: the n-th of one method, before it has done anything or when it has
done it all. The completion that the method was given says whose request must fail. All others give the tokens that they
give undisturbed, every invariant holds, and when all are over every cell is free or of the prefix cache.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcellar import Engine, EngineClosed, EngineFailed
from kvcellar.engine.core.request import Completion, Request
from kvcellar.engine.load import capacity
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Plan
from kvcellar.sampling_params import SamplingParams
from tests.engine.mixes import Ear, assert_at_rest, bytes_for
from tests.engine.test_limits import held
from tests.zoo import ARCHS, layers

FEW, ALL = (0, 9), (0, 2, 9, 30)  # calls of a method, at which it raises; `--long`: all
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


class Injected(Exception):
    """What no code expects."""


@dataclass
class Fault:
    """`method` raises at call number `at`: before it does anything, or, `late`, when it has done it."""

    at: int
    late: bool
    fired: bool = False
    request: Request | None = None  # of the completion that the call was about
    calls: int = 0

    def wrap(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **named: Any) -> Any:
            self.calls += 1
            now = self.calls == self.at + 1
            if now and not self.late:
                self._fire(args)
            made = method(*args, **named)
            if now:
                self._fire(args)
            return made

        return wrapped

    def _fire(self, args: tuple[Any, ...]) -> None:
        self.fired = True
        if args and isinstance(args[0], Completion):
            self.request = args[0].request
        raise Injected(f"at call {self.at}")


def reads_what_it_sees(memory: Memory, plan: Plan, ids: list[int], want: list[int]) -> Tensor:
    """In place of a guest's forward: writes the tokens as values, and reads all that each wanted row may see."""
    sums = dict.fromkeys(want, 1)
    for group, part in zip(memory.storage.groups, plan.groups, strict=True):
        k, v = (torch.zeros(len(ids), plane.heads, plane.size) for plane in group.planes)
        v[:, 0, 0] = torch.tensor(ids)
        for layer in group.layers:
            memory.put(layer, k, v)
            for segment, (_, values) in zip(part.segments, memory.get(layer).each_in_order(), strict=True):
                tokens = [int(value) for value in values[:, 0, 0]]
                for row in sums.keys() & set(range(segment.row, segment.row + len(segment.pos))):
                    pos = segment.pos.start + row - segment.row
                    seen = tokens[max(0, part.layout.lowest(pos) - segment.first) : pos + 1 - segment.first]
                    for token in seen:
                        sums[row] = (sums[row] * 31 + token + layer) % 1_000_003
    mixed = torch.tensor(list(sums.values()), dtype=torch.long)[:, None]  # [R,1]
    return (torch.arange(101) * (1 + mixed % 100) + mixed) % 101 * 0.05  # [R,101], each number once in a row


@dataclass
class Mix:
    """One engine with little memory, and what its requests give when nothing goes wrong."""

    engine: Engine
    wanted: list[Any] = field(default_factory=list[Any])

    def play(self) -> list[Ear]:
        """The prefix cache has what two requests left, of which one had two outputs; then all the others arrive
        together."""
        for prompt, n in (([7] * 9, 2), (list(range(20, 31)), 1)):
            first = Ear()
            self.engine.submit(prompt, SamplingParams(max_tokens=3, n=n, **GREEDY), deliver=first)
            first.wait()
        ears = [Ear() for _ in range(9)]
        with held(self.engine):
            self._submit(ears)
        for ear in ears:
            ear.wait()
        return ears

    def _submit(self, ears: list[Ear]) -> None:
        sampled: dict[str, Any] = {"temperature": 1.0, "ignore_eos": True}
        asks: list[tuple[list[int], dict[str, Any]]] = [
            ([5, 6, 7], {"max_tokens": 9, **GREEDY}),
            (list(range(40, 52)), {"max_tokens": 7, "n": 2, "seed": 4, **sampled}),
            ([9, 8], {"max_tokens": 44, "shift": True, "num_keep": 2, **GREEDY}),
            ([*range(20, 31), 60, 61], {"max_tokens": 6, **GREEDY}),  # goes on where one before has ended
            (list(range(60, 78)), {"max_tokens": 5, "seed": 2, **sampled}),
            ([3, 4, 5], {"max_tokens": 30, **GREEDY}),
            (list(range(60, 80)), {"max_tokens": 4, "seed": 3, **sampled}),  # waits for the one that begins alike
            ([*range(60, 70), 5, 6], {"max_tokens": 3, **GREEDY}),
            ([*range(60, 70), 5, 7], {"max_tokens": 3, **GREEDY}),
        ]
        for (prompt, how), ear in zip(asks, ears, strict=True):
            self.engine.submit(prompt, SamplingParams(**how), deliver=ear)


@pytest.fixture(scope="module")
def mix() -> Iterator[Mix]:
    """Memory for 50 tokens: some completions are preempted, and what the prefix cache has is evicted."""
    network = ARCHS["ministral"].build(num_hidden_layers=2, layer_types=layers("SF"))
    settings: dict[str, Any] = {"context": 32, "step_tokens": 10, "max_sequences": 5, "threads": 1}
    with Engine(network, cache_bytes=bytes_for(network, 50, **settings), **settings) as engine:
        engine._built.guest.forward = reads_what_it_sees  # type: ignore[method-assign]
        mix = Mix(engine)
        mix.wanted = [ear.answers() for ear in mix.play()]
        assert engine.stats().preemptions
        yield mix


@pytest.fixture
def calls(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return ALL if request.config.getoption("--long") else FEW


@pytest.fixture(autouse=True)
def quiet(monkeypatch):
    monkeypatch.setattr(logging.getLogger("kvcellar.engine"), "disabled", True)


@contextmanager
def broken(monkeypatch: pytest.MonkeyPatch, mix: Mix, part: str, name: str, fault: Fault) -> Iterator[None]:
    built, loop = mix.engine._built, mix.engine._loop
    parts: dict[str, Any] = {
        "manager": loop.manager, "scheduler": loop.scheduler, "memory": built.memory,
        "guest": built.guest, "runner": built.runner, "loop": loop, "completion": Completion,
        "compaction": loop.compaction, "prefixes": loop.manager.prefixes, "tree": loop.manager.prefixes.tree,
        "order": loop.manager.prefixes.tree._order,
        "claims": built.memory.claims, "drafting": loop.manager.drafting,
    }  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(parts[part], name, fault.wrap(getattr(parts[part], name)))
        yield


OF_ONE = {  # the request of the completion that they are given is the one that fails
    "manager": ["shares", "reads_back", "reuse", "admit", "start", "next_end", "fork", "release", "drop", "shift"],
    "scheduler": ["enqueue", "add_running", "remove", "_add", "_fits"],
    "completion": ["accept", "become"],
}
OF_MANY = {  # of a step, or of what a completion's operation needs: one request fails at most
    "manager": ["free", "available", "reserve", "evict", "_publish", "_publish_needed"],
    "scheduler": [
        "schedule", "_preempt", "preempt_last", "_admit", "_make_free", "_missing", "_shortened",
        "_add_drafts", "_draft",
    ],
    "drafting": ["chain", "learn", "close", "fork", "report", "conclude"],
    "prefixes": [
        "restorable", "restore", "use", "fork", "want", "checkpoints", "publish", "release", "evict", "_insert",
        "_share", "_frees", "_add_checkpoint", "claimed",
    ],
    "tree": [
        "root", "peek", "match", "touch", "share", "lock", "unlock", "insert", "evict_leaf", "evict_checkpoint",
        "_lock", "_append", "_take_checkpoints", "_split", "_merge", "_cut", "_removed", "_settle",
        "_add_checkpoint", "_useful", "strengthen", "expire", "evict_window", "resumes", "_rank_tail",
    ],
    "order": ["enter_leaf", "enter_lease", "enter_tail"],
    "claims": [
        "of", "exclusive", "make", "assemble", "split", "join", "drop", "drop_checkpoint", "move_checkpoint",
        "share_with", "forget",
    ],
    "memory": ["begin", "commit", "fork", "remove", "drop", "can_cut", "length", "has", "free", "used"],
    "guest": ["forward"],
    "runner": ["step", "_transact", "_ready", "_siblings", "_draw", "_emit", "_fork", "_accept", "_feeds", "_keep"],
    "loop": ["_free"],
    "compaction": ["compact_some"],
    "completion": ["finish"],  # it has told the end already
}  # fmt: skip


RARE = {
    "shift",
    "remove",
    "drop",
    "preempt_last",
    "_frees",
    "exclusive",
    "drop_checkpoint",
    "evict_checkpoint",
}  # not in every mix of requests


def each(methods: dict[str, list[str]]) -> Any:
    return pytest.mark.parametrize(
        ("part", "name"), [(part, name) for part, names in methods.items() for name in names]
    )


def play_broken(
    monkeypatch: pytest.MonkeyPatch, mix: Mix, part: str, name: str, calls: tuple[int, ...], *, late: bool, own: bool
) -> None:
    fired = 0
    for at in calls:
        fault = Fault(at, late)
        mix.engine.clear_cache()
        with broken(monkeypatch, mix, part, name, fault):
            ears = mix.play()
            mix.engine.stats()
        failed = [index for index, ear in enumerate(ears) if ear.error is not None]
        assert all(isinstance(ears[index].error, EngineFailed) for index in failed)
        assert [e.answers() for i, e in enumerate(ears) if i not in failed] == [
            wanted for i, wanted in enumerate(mix.wanted) if i not in failed
        ]
        if own and fault.request is not None:
            assert failed == [index for index, ear in enumerate(ears) if fault.request.deliver.__self__._deliver is ear]
        else:
            assert len(failed) <= 1
        assert mix.engine.healthy
        assert_at_rest(mix.engine)
        fired += fault.fired
        if not fault.fired:
            break
    assert fired or name in RARE, "it was never called"


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@each(OF_ONE)
def test_an_error_ends_the_request_that_it_belongs_to(monkeypatch, mix, part, name, calls, late) -> None:
    play_broken(monkeypatch, mix, part, name, calls, late=late, own=True)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@each(OF_MANY)
def test_an_error_of_several_ends_one_request_at_most(monkeypatch, mix, part, name, calls, late) -> None:
    play_broken(monkeypatch, mix, part, name, calls, late=late, own=False)


OF_STATES = {
    "runner": ["_feeds", "_keep"],
    "prefixes": ["publish", "evict_row", "_frees"],
    "tree": ["insert", "evict_checkpoint"],
    "claims": ["make", "assemble", "drop_checkpoint", "exclusive"],
    "memory": ["commit"],
}


@each(OF_STATES)
def test_nor_does_an_error_lose_rows_of_recurrent_state(monkeypatch, part, name) -> None:
    """There are few, so that checkpoints are evicted."""
    monkeypatch.setattr(capacity, "MOST_CHECKPOINTS", 1)
    with Engine(
        ARCHS["lfm2"].build(), cache_bytes=4_000_000, context=32, step_tokens=10, max_sequences=2, threads=1
    ) as engine:
        mix = Mix(engine)
        mix.wanted = [ear.answers() for ear in mix.play()]
        play_broken(monkeypatch, mix, part, name, (0, 4), late=True, own=False)


def test_where_memory_cannot_be_put_in_order_the_engine_ends_and_everybody_hears_it(monkeypatch) -> None:
    ears = [Ear() for _ in range(4)]
    with Engine(ARCHS["llama"].build(), cache_bytes=400_000, threads=1) as engine:
        loop = engine._loop
        with held(engine):
            for number, ear in enumerate(ears):
                engine.submit([5, 6, 7 + number], SamplingParams(max_tokens=4), deliver=ear)
            monkeypatch.setattr(loop.manager, "next_end", Fault(2, late=False).wrap(loop.manager.next_end))
            monkeypatch.setattr(loop.manager, "check", lambda _: 1 // 0)
        errors = [ear.wait().error for ear in ears]
        loop._device.wait_for(loop)
        assert not engine.healthy
        with pytest.raises(EngineClosed, match="open a new one"):
            engine.generate([5])
    assert all(isinstance(error, EngineFailed) for error in errors)
    assert sum("Injected" in str(error) for error in errors) == 1
    assert sum("the engine stopped on ZeroDivisionError" in str(error) for error in errors) == 3
