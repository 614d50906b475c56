"""A recorded forward, replayed operator by operator, gives the logits of the network's own modules, bit for bit."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.input_limits import random_tokens
from kvcellar.engine.recording import record as recording_of
from kvcellar.engine.recording.capture import capture
from kvcellar.engine.recording.program import Program
from kvcellar.engine.recording.record import record
from kvcellar.engine.recording.recording import NotRecordable, RecordedStep, Results
from kvcellar.engine.recording.replay import Replay
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.models.served import SOLO
from tests.zoo import ARCHS


@pytest.fixture(autouse=True)
def without_traces_of_torch(caplog: pytest.LogCaptureFixture) -> None:
    """Torch logs every symbolic size, and pytest would keep that."""
    caplog.set_level(logging.WARNING, "torch.__trace")


SOME = ("llama", "gemma3n", "lfm2", "deepseek-v3", "qwen3-moe", "mamba2")  # others: test_recording_native.py


class Steps:
    """Steps of one memory: the same for every guest of a network."""

    def __init__(self, guest: Guest, rows: int = 12) -> None:
        self.memory = guest.memory({group.name: 160 for group in guest.shape.groups}, rows=rows)
        self.logits: list[Tensor] = []
        self._guest = guest
        self._ids = random_tokens(guest.model, 128, torch.Generator().manual_seed(7))

    def step(
        self,
        fed: Sequence[tuple[int, int]],
        *,
        wanted: int | None = None,
        kept: dict[int, int] | None = None,
        stores: bool = True,
    ) -> None:
        """`fed`: sequences and their numbers of tokens. `wanted`: only so many rows, the last first."""
        lengths = [(seq, self.memory.length(seq), count) for seq, count in fed]
        feeds = [
            Feed(seq, Span(at, at + count), revertible=kept is not None, stores=stores or seq != fed[0][0])
            for seq, at, count in lengths
        ]
        ids = [self._ids[at + 3 * seq + place] for seq, at, count in lengths for place in range(count)]
        plan = self.memory.begin(Batch(tuple(feeds)))
        self.logits.append(self._guest.forward(self.memory, plan, ids, range(len(ids))[::-1][:wanted]).clone())
        self.memory.commit(kept)


def timeline(guest: Guest) -> list[Tensor]:
    """Chunks of prompts beside single tokens, decoding, parts of feeds that are kept, and query-only rows."""
    steps = Steps(guest)
    steps.step([(0, 13), (1, 3), (2, 1)])
    steps.step([(0, 1), (1, 1), (2, 1)])
    steps.step([(0, 4), (1, 4)], wanted=2)
    steps.step([(2, 1)], wanted=1)
    steps.step([(0, 5), (1, 1), (2, 2)], wanted=3)
    if guest.no_partial_commit is None:
        steps.step([(0, 4), (1, 4)], kept={0: 2, 1: 1})
    steps.step([(0, 2), (1, 1)], stores=False)
    steps.step([(0, 2)], wanted=0)
    steps.step([(0, 1), (1, 1)])
    return steps.logits


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow) if name == "gemma3n" else name for name in SOME]
)
def test_a_replayed_forward_equals_the_modules(name: str, dtype: torch.dtype) -> None:
    guest = build_guest(ARCHS[name].build().to(dtype), backends())
    theirs = timeline(guest)
    record(guest, lambda program: Replay(program, guest.model))
    assert guest.not_recorded is None
    ours = timeline(guest)
    assert guest.recording is not None
    assert (guest.recording.steps, guest.recording.by_modules) == (len(ours), {})
    assert [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(theirs)


@pytest.mark.parametrize("name", SOLO)
def test_a_model_that_runs_solo_is_not_recorded(name: str) -> None:
    guest = build_guest(ARCHS[name].build(), backends())
    with pytest.raises(NotRecordable, match="one sequence per forward"):
        capture(guest)


class Halved(nn.Module):
    """Half of the result of another module, for more than 30 rows."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        out = self.whole(x)
        return out / 2 if x.shape[1] > 30 else out


class HalvedLayer(LlamaDecoderLayer):
    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        out = super().forward(hidden_states, **kwargs)
        return out / 2 if out.shape[1] > 30 else out


def test_a_module_that_depends_on_the_number_of_rows_is_called_as_it_is() -> None:
    model = ARCHS["llama"].build()
    for layer in model.model.layers:
        layer.mlp = Halved(layer.mlp)
    guest = build_guest(model, backends())
    record(guest, lambda program: Replay(program, guest.model))
    assert guest.recording is not None
    assert guest.recording.captured.opaque == {"Halved": "its code depends on how many rows there are"}
    for rows in (30, 31, 40):
        ours, theirs = Steps(guest), Steps(guest)
        ours.step([(0, rows)])
        recording, guest.recording = guest.recording, None
        theirs.step([(0, rows)])
        guest.recording = recording
        assert torch.equal(ours.logits[0], theirs.logits[0])


def test_a_layer_that_depends_on_the_number_of_rows_is_not_recorded() -> None:
    model = ARCHS["llama"].build()
    for layer in model.model.layers:
        layer.__class__ = HalvedLayer
    guest = build_guest(model, backends())
    with pytest.raises(NotRecordable, match="its code depends on how many rows there are"):
        capture(guest)


class Wrong(Replay):
    """Replays with other results: hidden states, or logits of long steps."""

    wrong = ""

    def run(self, step: RecordedStep) -> Results:
        results = super().run(step)
        assert results.hidden is not None
        if self.wrong == "hidden":
            return replace(results, hidden=results.hidden + 1)
        return replace(results, logits=results.logits + 1) if len(step.ids) > 64 else results


@pytest.mark.parametrize(("wrong", "steps"), [("hidden", 2), ("long", 1)])
def test_a_recording_with_wrong_results_is_not_used(wrong: str, steps: int) -> None:
    guest = build_guest(ARCHS["llama"].build(), backends())
    captured = capture(guest)
    recording_of.tested(guest, captured, lambda program: Replay(program, guest.model))

    def execute(program: Program) -> Wrong:
        made = Wrong(program, guest.model)
        made.wrong = wrong
        return made

    with pytest.raises(
        NotRecordable, match=rf"results differ from those of its modules, by 1\.0e\+00, in {steps} of 9 steps"
    ):
        recording_of.tested(guest, captured, execute)
