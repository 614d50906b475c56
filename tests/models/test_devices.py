"""Every tensor is created on the model's device, tested on a CPU with torch's meta device.

Tensors on torch's meta device have shapes and no numbers. Where that is the default device, a tensor that is created
without a device cannot be read. Where it is the model's device, torch refuses operations with CPU tensors.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcellar import Engine
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.sample.draw import Drawn, draw
from kvcellar.engine.sample.sampler import Sampler
from kvcellar.errors import NotSupported
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.attention.reference import Reference
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.kv.history import Backend
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import StoredAs
from kvcellar.memory.spans import Span
from kvcellar.sampling_params import SamplingParams
from tests.zoo import ARCHS

META = torch.device("meta")
ALL_PARAMETERS = {
    "temperature": 0.8, "top_k": 9, "top_p": 0.9, "typical_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1,
    "presence_penalty": 0.1, "frequency_penalty": 0.1, "logit_bias": {5: 1.0}, "logprobs": 3, "min_tokens": 2,
    "stop_token_ids": (7,),
}  # fmt: skip
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    ALL_PARAMETERS,
    {"top_k": 5, "min_p": 0.1},
]
CASES: list[tuple[str, str, Backend | None]] = [
    # flat: full, sliding, chunked, sinks, latent
    *((name, "auto", None) for name in ("llama", "gemma3", "llama4", "gpt-oss", "deepseek-v3")),
    # solo: its own biases, an indexer
    *((name, "auto", None) for name in ("bloom", "deepseek-v3.2")),
    # recurrent layers alone, and beside attention
    *((name, "auto", None) for name in ("mamba", "mamba2", "lfm2", "qwen3-next", "kimi-linear")),
    *((name, stored, None) for name in ("gemma3", "bloom") for stored in ("int8", "k=int4+hadamard,v=fp8")),
    *((name, "auto", backend) for name in ("gemma3", "gpt-oss") for backend in (Sdpa(fused=True), Reference())),
]


EXPERTS = ("gpt-oss", "deepseek-v3", "deepseek-v3.2", "qwen3-next", "kimi-linear")  # torch cannot route meta tensors


def shallow(name: str) -> PreTrainedModel:
    """A network of two layers, the first and the last kind of its own: torch runs meta tensors slowly."""
    kinds = dict(ARCHS[name].own).get("layer_types")
    if kinds is not None:
        return ARCHS[name].build(num_hidden_layers=2, layer_types=[kinds[0], kinds[-1]])
    return ARCHS[name].build(**{"n_layer" if name == "bloom" else "num_hidden_layers": 2})


def label(what: object) -> str:
    return what.name if isinstance(what, Sdpa | Reference) else str(what)


def text(seed: int, n: int) -> list[int]:
    return [3 + (seed * 31 + i * 17) % 90 for i in range(n)]


class Scenario:
    """Some sequences of one guest, with all logits and draws."""

    def __init__(self, guest: Guest, *, draws: bool = True) -> None:
        self.guest, self.draws = guest, draws
        cells = {group.name: 96 for group in guest.shape.groups}
        self.memory: Memory = guest.memory(cells, rows=12)
        self.logits: list[Tensor] = []
        self.drawn: list[Drawn] = []
        self.shifted = False

    def step(self, new: Mapping[int, int], *, part: int | None = None, stores: bool = True) -> None:
        """So many tokens of each sequence, and a draw for each; commits `part` of the first one's."""
        memory, flat = self.memory, self.guest.mode == "flat"
        for some in [new] if flat else [{seq: n} for seq, n in new.items()]:
            feeds = tuple(
                Feed(seq, Span(at := memory.length(seq), at + n), stores, keep_state=n > 2, revertible=part is not None)
                for seq, n in some.items()
            )
            plan = memory.begin(Batch(feeds))
            rows = [sum(len(feed.pos) for feed in feeds[: i + 1]) - 1 for i in range(len(feeds))]
            ids = [token for feed in feeds for token in text(feed.seq, feed.pos.end)[feed.pos.start :]]
            logits = self.guest.forward(memory, plan, self.here(ids), self.here(rows))
            memory.commit(None if part is None else {feeds[0].seq: part})
            self.logits.append(logits)
            if self.draws:
                self.draw(logits, [feed.pos.end for feed in feeds])

    def here(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, device=self.guest.device)

    def draw(self, logits: Tensor, positions: Sequence[int]) -> None:
        vocab = min(logits.shape[1], 101)
        for at in range(len(SAMPLING)):
            samplers = [
                Sampler(
                    SamplingParams(**SAMPLING[(at + row) % len(SAMPLING)]),
                    seed=3, index=row, prompt_ids=text(row, 6), vocab_size=vocab, end_ids=frozenset({2}),
                )
                for row in range(len(positions))
            ]  # fmt: skip
            self.drawn += draw(logits, samplers, positions)

    def play(self) -> None:
        """Prefill beside decoding, forks, partial commits, query-only rows, edits, and everything that moves cells."""
        memory, rows = self.memory, self.guest.shape.recurrent is not None
        self.step({0: 9, 1: 4})
        memory.fork(0, 2, 9)
        self.step({0: 1, 1: 3, 2: 1})
        if self.guest.mode == "flat":
            self.step({2: 4, 1: 1}, part=2)
            if not rows:
                self.step({0: 1}, stores=False)
        try:
            memory.remove(0, Span(2, 5))
            self.shifted = True
        except NotSupported:
            memory.drop(0)
        self.step({0: 2, 1: 1})
        memory.drop(1)
        while memory.storage.compact(7):
            pass
        if self.guest.mode == "flat":
            plan = memory.begin(Batch((Feed(0, Span(20, 23)), Feed(8, Span(7, 9)))), reserve=True)
            self.guest.forward(memory, plan, self.here([5] * 5), self.here([4]))
            memory.abandon()
        self.step({2: 2, 3: 5})


@pytest.mark.parametrize(("name", "stored", "backend"), CASES, ids=label)
def test_no_step_creates_a_tensor_on_the_default_device(name: str, stored: str, backend: Backend | None) -> None:
    here, there = shallow(name), shallow(name)
    candidates = backends() if backend is None else (backend,)
    scenarios: list[Scenario] = []
    for model, place in ((here, torch.device("cpu")), (there, META)):
        with place:
            scenario = Scenario(build_guest(model, candidates).storing(StoredAs.parse(stored), candidates))
            scenario.play()
            scenario.memory.check()
            scenarios.append(scenario)
    one, other = scenarios
    assert (one.guest.mode, one.shifted) == (other.guest.mode, other.shifted)
    assert one.shifted or name != "llama"
    assert all(torch.equal(a, b) for a, b in zip(one.logits, other.logits, strict=True))
    assert one.drawn == other.drawn


@pytest.mark.parametrize(("name", "stored", "backend"), [case for case in CASES if case[0] not in EXPERTS], ids=label)
def test_all_tensors_of_a_step_are_on_the_models_device(name: str, stored: str, backend: Backend | None) -> None:
    candidates = (Sdpa(), Reference()) if backend is None else (backend,)  # the kernel is for CPUs
    guest = build_guest(shallow(name), candidates).storing(StoredAs.parse(stored), candidates)
    guest.model.to(META)  # pyright: ignore[reportCallIssue, reportArgumentType]
    scenario = Scenario(guest, draws=False)
    scenario.play()
    assert scenario.logits
    assert all(logits.device == META for logits in scenario.logits)


@pytest.mark.parametrize("name", ["gemma3", "bloom", "lfm2"])
def test_an_engine_does_not_depend_on_the_default_device(name: str) -> None:
    settings: dict[str, Any] = {"cache_bytes": 10**6, "context": 64, "threads": 1, "max_sequences": 4}
    results: list[Any] = []
    for place in (torch.device("cpu"), META):
        model = shallow(name)
        with place, Engine(model, **settings) as engine:
            result = engine.generate(text(1, 9), max_tokens=5, n=2, seed=3, **ALL_PARAMETERS)
            results.append((engine.capacity(), result.choices))
    assert results[0] == results[1]
