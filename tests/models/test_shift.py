"""Context shift on real architectures: moved keys equal keys computed at the new positions."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.rope import TOKENS, stored_at
from kvcellar.errors import NotSupported
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.zoo import ARCHS

GONE = Span(8, 8 + 16)  # whole windows and whole chunks of the zoo's, inside the filler
FILLER = 32
SHIFTED = (
    "llama", "llama-rope-llama3", "llama-rope-yarn", "llama-rope-linear", "llama-rope-dynamic", "llama4-untempered",
    "phi3-longrope", "phi", "qwen3", "gemma2", "gemma3", "gemma3n",
    "gemma4-e2b", "gpt-oss", "cohere", "cohere2", "olmo3", "glm4", "ernie4.5", "smollm3", "stablelm", "gpt-neox",
    "deepseek-v2", "deepseek-v3", "mimo-v2-flash", "laguna", "modernbert-decoder", "nanochat", "exaone4",
)  # fmt: skip
REFUSED = {
    "gpt2": "logits change", "opt": "logits change", "llama4": "logits change", "bloom": "runs solo",
    "hunyuan-dense": "logits change",
}  # fmt: skip


@dataclass
class Placed:
    """A sequence whose last TOKENS tokens have the K/V of the probe at their positions; the rest is filler."""

    memory: Memory
    ids: Tensor

    def planes(self, layer: int) -> dict[str, Tensor]:
        """K/V of a layer for the last TOKENS - 1 positions, in order."""
        memory = self.memory
        end = memory.length(1)
        plan = memory.begin(Batch((Feed(1, Span(end, end + 1)),)))
        history = memory.get(layer)
        keys, values = history.in_order()
        memory.abandon()
        assert plan.tokens == 1
        return {"k": keys[:-1], "v": values[:-1]}


def place(guest: Guest, filler: int) -> Placed:
    stored, _, ids = stored_at(guest, filler)
    memory = guest.memory({group.name: 256 for group in guest.shape.groups})
    generator = torch.Generator().manual_seed(1)
    memory.begin(Batch((Feed(1, Span(0, filler)),)))
    for layer, planes in stored.items():
        shapes = {name: (filler, *x.shape[1:]) for name, x in planes.items()}
        memory.put(layer, *(torch.randn(shapes[name], generator=generator) for name in ("k", "v")))
    memory.commit()
    memory.begin(Batch((Feed(1, Span(filler, filler + TOKENS)),)))
    for layer, planes in stored.items():
        memory.put(layer, planes["k"], planes["v"])
    memory.commit()
    return Placed(memory, ids)


def last(planes: dict[str, Tensor], count: int) -> dict[str, Tensor]:
    return {name: x[-count:] for name, x in planes.items()}


@pytest.fixture(params=SHIFTED)
def guest(request: pytest.FixtureRequest) -> Guest:
    return build_guest(ARCHS[request.param].build(), backends())


def test_shifted_keys_equal_keys_computed_at_the_new_positions(guest: Guest) -> None:
    """And values are unchanged: to 1e-4 of the largest element, in float32, in every layer."""
    moved = place(guest, FILLER)
    fresh = place(guest, FILLER - len(GONE))
    before = moved.memory.length(1)
    kept = moved.memory.remove(1, GONE)
    assert kept == before - len(GONE) == fresh.memory.length(1)
    moved.memory.check()
    for group in guest.shape.groups:
        for layer in group.layers:
            ours, theirs = moved.planes(layer), fresh.planes(layer)
            count = min(len(ours["k"]), len(theirs["k"]), TOKENS - 1)
            assert count
            for name in ("k", "v"):
                a, b = last(ours, count)[name], last(theirs, count)[name]
                assert (a - b).abs().max() <= 1e-4 * b.abs().max().clamp(min=1.0), f"{name} of layer {layer}"


def test_logits_after_a_shift_equal_those_over_the_same_kv_at_the_new_positions(guest: Guest) -> None:
    moved = place(guest, FILLER)
    before = moved.memory.length(1)
    moved.memory.remove(1, GONE)
    # A fresh memory gets the expected K/V: the filler around the gap, the probe's at its new positions.
    fresh = guest.memory({group.name: 256 for group in guest.shape.groups})
    stored, _, _ = stored_at(guest, FILLER - len(GONE))
    generator = torch.Generator().manual_seed(1)
    fresh.begin(Batch((Feed(1, Span(0, FILLER - len(GONE))),)))
    for layer, planes in stored.items():
        k, v = (torch.randn((FILLER, *planes[name].shape[1:]), generator=generator) for name in ("k", "v"))
        turned = rotated(guest, layer, {"k": k, "v": v})
        fresh.put(layer, turned["k"], turned["v"])
    fresh.commit()
    fresh.begin(Batch((Feed(1, Span(FILLER - len(GONE), FILLER - len(GONE) + TOKENS)),)))
    for layer, planes in stored.items():
        fresh.put(layer, planes["k"], planes["v"])
    fresh.commit()
    assert fresh.length(1) == moved.memory.length(1) == before - len(GONE)
    got = [decode(guest, memory, fresh.length(1)) for memory in (moved.memory, fresh)]
    assert (got[0] - got[1]).abs().max() <= 1e-4 * got[1].abs().max().clamp(min=1.0)


def rotated(guest: Guest, layer: int, planes: dict[str, Tensor]) -> dict[str, Tensor]:
    """The filler without the gap, what followed it rotated back by multiplication of complex numbers."""
    group = next(group for group in guest.shape.groups if layer in group.layers)
    out: dict[str, Tensor] = {}
    for name, x in planes.items():
        behind = x[GONE.end :].double()
        rotation = group.rotations.get(layer, {}).get(name)
        if rotation is not None:
            n, start = len(rotation.frequencies), rotation.start
            inner = behind[..., start : start + 2 * n]
            pairs = (
                inner.unflatten(-1, (n, 2)) if rotation.interleaved else inner.unflatten(-1, (2, n)).transpose(-1, -2)
            )
            angle = -len(GONE) * torch.tensor(rotation.frequencies, dtype=torch.float64)
            turned = torch.view_as_real(
                torch.view_as_complex(pairs.contiguous()) * torch.polar(torch.ones(n).double(), angle)
            )
            flat = turned.flatten(-2) if rotation.interleaved else turned.transpose(-1, -2).flatten(-2)
            behind = torch.cat([behind[..., :start], flat, behind[..., start + 2 * n :]], dim=-1)
        out[name] = torch.cat([x[: GONE.start], behind.float()])
    return out


def decode(guest: Guest, memory: Memory, pos: int) -> Tensor:
    plan = memory.begin(Batch((Feed(1, Span(pos, pos + 1)),)))
    logits = guest.forward(memory, plan, torch.tensor([5]), torch.tensor([0]))
    memory.abandon()
    return logits.float()


@pytest.mark.parametrize("name", REFUSED)
def test_an_inexact_shift_is_refused_and_changes_nothing(name: str) -> None:
    guest = build_guest(ARCHS[name].build(), backends())
    memory = guest.memory({group.name: 64 for group in guest.shape.groups})
    plan = memory.begin(Batch((Feed(1, Span(0, 20)),)))
    guest.forward(memory, plan, torch.arange(20), torch.tensor([19]))
    memory.commit()
    before = (memory.held(1), memory.free())
    with pytest.raises(NotSupported, match=REFUSED[name]):
        memory.remove(1, Span(2, 10))
    assert (memory.held(1), memory.free()) == before
    memory.check()
