"""A draft model without a network: what it draws is a function of exactly what it sees in memory, so that one wrong
entry gives other drafts. And the tiers below its memory."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcellar.engine.speculate.chain import Chain
from kvcellar.engine.speculate.draft_memory import DraftMemory
from kvcellar.engine.speculate.draft_model import ModelDrafter
from kvcellar.memory import restore_plan
from kvcellar.memory.kv.record import positions
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Plan
from kvcellar.memory.prefix.stored import Catalogue
from kvcellar.memory.prefixes import Prefixes
from kvcellar.memory.restore_plan import Planner
from kvcellar.memory.restores import Evict
from kvcellar.memory.retention import NO_OPTIONS, RetentionOptions
from kvcellar.memory.spans import Span
from kvcellar.memory.store import Store
from kvcellar.memory.tiers.disk import DiskTier
from tests.engine.test_prefixes import KINDS, LAYOUTS, memory, spelt
from tests.speculate.chains import sampler

VOCAB = 7
PATIENCE = 240.0


def drawn(kind: str, text: Sequence[int]) -> int:
    """The token that follows a text: of what each layer sees at its end."""
    names, recurrent = KINDS[kind]
    seen: list[float] = []
    for name in names:
        low = LAYOUTS[name].lowest(len(text) - 1)
        seen.append(float(spelt(list(text), Span(low, len(text)))[:, 0, 0].sum()))
    return _token([*seen, float(sum(text))] if recurrent else seen)


def _token(seen: Sequence[float]) -> int:
    return int(sum((7 + 4 * i) * value for i, value in enumerate(seen))) * 31 // 5 % VOCAB


def expected(kind: str, text: Sequence[int], count: int) -> list[int]:
    whole = list(text)
    for _ in range(count):
        whole.append(drawn(kind, whole))
    return whole[len(text) :]


class Network:
    """One sequence in a forward."""

    def __init__(self, kind: str) -> None:
        self.kind, self.computed = kind, 0

    def __call__(self, memory: Memory, plan: Plan, ids: list[int], rows: list[int]) -> Tensor:
        (feed,) = plan.feeds
        new, names, recurrent = feed.pos, *KINDS[self.kind]
        self.computed += len(ids)
        seen: list[float] = []
        for layer, name in enumerate(names):
            values = spelt([0] * new.start + ids, new)
            memory.put(layer, values, values)
            visible = memory.get(layer).in_order()[0][-(new.end - LAYOUTS[name].lowest(new.end - 1)) :]
            seen.append(float(visible[:, 0, 0].sum()))
        if recurrent:
            before = memory.states.read(9, plan.states)["sum"]

            def at(indices: Sequence[int], counts: Sequence[int]) -> dict[str, Tensor]:
                return {"sum": torch.stack([before[i] + sum(ids[:n]) for i, n in zip(indices, counts, strict=True)])}

            memory.states.write(9, plan.states, at([0], [len(ids)]), at=at)
            seen.append(float(before) + sum(ids))
        logits = torch.zeros(1, VOCAB)
        logits[0, _token(seen)] = 9.0
        return logits


class Drafting:
    """A drafter on a memory of one kind, with a store in a directory if one is given."""

    def __init__(self, kind: str, directory: Path | None = None, **options: Any) -> None:
        self.kind, self.network, self.calls = kind, Network(kind), SimpleQueue[Any]()
        stored = None if directory is None else partial(store_at, directory, self.calls.put)
        self.cache = DraftMemory(memory(kind), open_store=stored, **options)
        self.drafter = ModelDrafter("dumb", self.network, self.cache, context=190, step_tokens=150, batched=False)

    def drafts(self, texts: dict[int, Sequence[int]], room: int = 3, **where: Any) -> dict[int, list[int]]:
        """One call for the texts of these requests."""
        chains = [chain(number, text, room, **where) for number, text in texts.items()]
        self.drafter.propose(chains)
        self.check()
        return {one.key[0]: one.tokens for one in chains}

    def restored(self, number: int, text: Sequence[int], **where: Any) -> int:
        """Begin a completion, and wait for what is read back; returns how many entries need not be computed."""
        self.until(lambda: self.cache.open([chain(number, text, 0, **where)]) != [None])
        (seq,) = self.cache.open([chain(number, text, 0, **where)])
        assert seq is not None
        return self.cache.memory.length(seq)

    def close(self, number: int, *, keep: bool = True) -> None:
        self.drafter.close((number, 0), keep=keep)
        self.check()

    def until(self, done: Callable[[], bool]) -> None:
        until(done, self.cache, self.calls)

    def written(self) -> None:
        """Wait until everything is stored that is to be."""
        store = self.cache.store
        assert store is not None
        self.until(lambda: not store.unwritten)

    def check(self) -> None:
        self.drafter.check()

    def is_empty(self) -> bool:
        free = self.cache.memory.free()
        return free == dict.fromkeys(free, 200) and self.cache.memory.rows.free in (None, 100)


def always_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is stored is restored, however fast this machine computes it again, and however slowly it reads."""
    monkeypatch.setattr(Planner, "speed", lambda self: None)
    monkeypatch.setattr(restore_plan, "SHORTEST", restore_plan.LONGEST)


def until(done: Callable[[], bool], cache: DraftMemory, calls: SimpleQueue[Any]) -> None:
    """Do what the engine's thread does between two steps, until something is true."""
    end = time.monotonic() + PATIENCE
    while not done():
        assert time.monotonic() < end, "it does not come to an end"
        while not calls.empty():
            calls.get()()
        cache.pump()
        time.sleep(0.001)


def chain(
    number: int,
    text: Sequence[int],
    room: int,
    *,
    vocab: int = VOCAB,
    namespace: str = "",
    retention: RetentionOptions = NO_OPTIONS,
) -> Chain:
    sampling = sampler(vocab=vocab, temperature=0.0)
    return Chain((number, 0), text, sampling, len(text), room, namespace=namespace, shared=0, retention=retention)


def store_at(directory: Path, post: Any, memory: Memory, prefixes: Prefixes, evict: Evict) -> Store:
    disk = DiskTier(
        directory,
        identity=b"d" * 32,
        max_bytes=10**8,
    )
    store = Store(
        [disk],
        memory,
        prefixes,
        identity=b"d" * 32,
        secret=b"",
        staging=10**7,
        catalogue=Catalogue(anywhere=prefixes.anywhere, positions=positions),
        post=post,
        evict=evict,
    )
    store.load()
    return store
