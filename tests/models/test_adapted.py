"""A step computes sequences with adapters as the merged weights would, and those without as if there were none."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcellar.engine.models.adapters.adapters import read_adapter
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.load import sharing_weights
from kvcellar.engine.models.selftest import check_adapted
from kvcellar.errors import ModelRefused
from kvcellar.kernels.packed import pack
from kvcellar.memory.attention.choose import named
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.models.lora import ends_with, layers_of, merged, saved
from tests.zoo import ARCHS, reference_logits

ALL_LINEAR = {
    "llama": "flat, packed layers",
    "gpt2": "Conv1D, learned positions",
    "phi3": "joined projections",
    "gemma2": "windows beside full layers",
    "lfm2": "short convolutions run by a mixer",
    "qwen3-next": "gated recurrences, experts",
    "falcon-h1": "state spaces beside attention",
    "falcon": "solo",
    "gemma4-e2b": "shared K/V",
}
SOME = {
    "deepseek-v2": ("q_proj", "kv_a_proj_with_mqa", "o_proj"),
    "qwen3-moe": ("q_proj", "o_proj"),
    "mixtral": ("k_proj", "v_proj"),
    "llama": ("lm_head", "q_proj"),
}


def guest_of(model: PreTrainedModel, adapters: Sequence[Path], *, packed: bool = True) -> Guest:
    """With the adapters as numbers 1, 2 and so on."""
    network = sharing_weights(model)
    if packed:
        pack(network)
    guest = build_guest(network, named(None))
    for number, path in enumerate(adapters, start=1):
        guest.adapted.add(number, read_adapter([path], guest.model, most_bytes=lambda: 1 << 30))
        assert not any(check_adapted(guest, number))
        guest.adapted.check()
    return guest


class Steps:
    """Runs parts of texts, one sequence each, in steps; `logits` [L,V] by sequence."""

    def __init__(self, guest: Guest, texts: Mapping[int, list[int]], adapters: Mapping[int, int]) -> None:
        self.guest, self.texts, self.adapters = guest, texts, adapters
        self.memory = guest.memory({group.name: 200 for group in guest.shape.groups}, rows=12)
        self.logits: dict[int, list[Tensor]] = {seq: [] for seq in texts}

    def step(self, hidden: bool = False, **counts: int) -> None:
        """`s1=3`: the next three tokens of sequence 1."""
        feeds = []
        for name, count in counts.items():
            seq = int(name[1:])
            at = self.memory.length(seq) if self.memory.has(seq) else 0
            feeds.append(Feed(seq, Span(at, at + count), adapter=self.adapters[seq]))
        for part in [feeds] if self.guest.mode == "flat" else [[feed] for feed in feeds]:
            plan = self.memory.begin(Batch(tuple(part)))
            ids = [token for feed in part for token in self.texts[feed.seq][feed.pos.start : feed.pos.end]]
            if hidden:
                logits, _ = self.guest.forward_with_hidden(self.memory, plan, ids, range(len(ids)))
            else:
                logits = self.guest.forward(self.memory, plan, ids, range(len(ids))[::-1]).flip(0)
            self.memory.commit({feed.seq: len(feed.pos) for feed in part})
            for feed, rows in zip(part, logits.float().split([len(feed.pos) for feed in part]), strict=True):
                self.logits[feed.seq].append(rows)


def compared(model: PreTrainedModel, adapters: Sequence[Path], steps: Steps) -> None:
    for seq, rows in steps.logits.items():
        number = steps.adapters[seq]
        found, network = torch.cat(rows), merged(model, adapters[number - 1]) if number else model
        expected = reference_logits(network, steps.texts[seq][: len(found)])
        scale = max(1.0, float(expected.abs().max()))
        assert float((found - expected).abs().max()) <= 1e-4 * scale, f"sequence {seq}"
        if number:
            plain = reference_logits(model, steps.texts[seq][: len(found)])
            assert float((plain - expected).abs().max()) > 1e-2 * scale, "the adapter changes nothing"


def texts_of(lengths: Sequence[int]) -> dict[int, list[int]]:
    draw = torch.Generator().manual_seed(3)
    return {seq: torch.randint(3, 100, (n,), generator=draw).tolist() for seq, n in enumerate(lengths)}


def mixed(guest: Guest) -> Steps:
    """Two adapters and none, chunked prompts beside single tokens, in changing order."""
    steps = Steps(guest, texts_of([12, 10, 11, 8, 10]), {0: 1, 1: 0, 2: 2, 3: 1, 4: 0})
    steps.step(s0=5, s1=4, s2=3)
    steps.step(s1=2)
    steps.step(s3=4, s2=3, s0=1, s4=4)
    steps.step(s2=1, s0=1, s1=1, s4=1, s3=1)
    steps.step(s0=1, s1=1, s3=1, s2=1)
    steps.step(s4=5, s1=1)
    steps.step(s0=4, s2=3, s3=2, s1=1)
    return steps


@pytest.mark.parametrize("name", ALL_LINEAR)
def test_a_batch_with_adapters_equals_merged_weights(name: str, tmp_path: Path) -> None:
    model = ARCHS[name].build()
    head = model.get_output_embeddings()
    layers = layers_of(model, lambda module: model.get_submodule(module) is not head)
    adapters = [
        saved(tmp_path / str(n), layers, seed=n, r=n + 2, target_modules="all-linear", strength=0.05) for n in range(2)
    ]
    compared(model, adapters, mixed(guest_of(model, adapters)))


@pytest.mark.parametrize("name", SOME)
def test_some_layers_may_have_an_adapter(name: str, tmp_path: Path) -> None:
    model = ARCHS[name].build()
    targets = SOME[name]
    layers = layers_of(model, ends_with(*targets))
    adapters = [saved(tmp_path / str(n), layers, seed=n, target_modules=list(targets)) for n in range(2)]
    compared(model, adapters, mixed(guest_of(model, adapters, packed=False)))


def test_the_output_head_has_an_adapter_where_hidden_states_are_read(tmp_path: Path) -> None:
    model = ARCHS["llama"].build()
    adapters = [saved(tmp_path / "a", layers_of(model, ends_with("lm_head")), target_modules=["lm_head"])]
    steps = Steps(guest_of(model, adapters), texts_of([5, 5]), {0: 1, 1: 0})
    steps.step(True, s0=3, s1=2)
    steps.step(True, s1=3, s0=2)
    compared(model, adapters, steps)


@pytest.mark.parametrize("name", ["lfm2", "qwen3-next"])
def test_a_part_of_a_step_is_kept_with_the_adapter(name: str, tmp_path: Path) -> None:
    """Recurrent layers compute their state after fewer tokens when the step is committed."""
    model = ARCHS[name].build()
    layers = layers_of(model, ends_with("in_proj", "out_proj", "q_proj", "in_proj_qkvz"))
    adapters = [saved(tmp_path / name, layers, target_modules=["in_proj", "out_proj", "q_proj", "in_proj_qkvz"])]
    guest = guest_of(model, adapters)
    assert guest.no_partial_commit is None
    steps = Steps(guest, texts_of([10, 10]), {0: 1, 1: 0})
    feeds = tuple(Feed(seq, Span(0, 6), revertible=True, adapter=steps.adapters[seq]) for seq in (0, 1))
    plan = steps.memory.begin(Batch(feeds))
    guest.forward(steps.memory, plan, steps.texts[0][:6] + steps.texts[1][:6], [0])
    steps.memory.commit({0: 4, 1: 3})
    steps.step(s1=4, s0=5)
    for seq, start in ((0, 4), (1, 3)):
        network = merged(model, adapters[0]) if steps.adapters[seq] else model
        expected = reference_logits(network, steps.texts[seq])[start : start + len(steps.logits[seq][0])]
        torch.testing.assert_close(steps.logits[seq][0], expected, atol=1e-4, rtol=1e-4)


def test_layers_are_as_they_were_in_steps_without_adapters(tmp_path: Path) -> None:
    model = ARCHS["llama"].build()
    adapters = [saved(tmp_path / "a", layers_of(model, ends_with("q_proj", "v_proj")))]
    guest = guest_of(model, adapters)
    steps = Steps(guest, texts_of([6, 6]), {0: 1, 1: 0})
    own = {name: module for name, module in guest.model.named_modules() if "forward" in vars(module)}
    steps.step(s0=2, s1=2)
    replaced = [name for name, module in guest.model.named_modules() if "forward" in vars(module) and name not in own]
    assert replaced == list(layers_of(model, ends_with("q_proj", "v_proj")))
    guest.adapted.check()
    steps.step(s1=2)
    assert {name for name, module in guest.model.named_modules() if "forward" in vars(module)} == set(own)
    guest.adapted.check()
    guest.adapted.remove(1)
    assert not guest.adapted.adapters
    assert not guest.adapted._layers, "its matrices are freed"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_networks_in_half_precision_have_adapters(dtype: torch.dtype, tmp_path: Path) -> None:
    model = ARCHS["llama"].build().to(dtype)
    layers = layers_of(model, ends_with("q_proj", "down_proj"))
    path = saved(tmp_path / "a", layers, target_modules=["q_proj", "down_proj"])
    steps = Steps(guest_of(model, [path]), texts_of([20, 20]), {0: 1, 1: 0})
    steps.step(s0=15, s1=20)
    steps.step(s0=5)
    expected = reference_logits(merged(model.float(), path), steps.texts[0])
    gaps = (torch.cat(steps.logits[0]) - expected).abs().amax(-1) / expected.abs().max()
    assert float(gaps.median()) < 6e-2


# -- layers that cannot have one ---------------------------------------------------------------------------------------


def refused(model: PreTrainedModel, path: Path, reason: str) -> None:
    guest = build_guest(sharing_weights(model), named(None))
    before = {name for name, module in guest.model.named_modules() if "forward" in vars(module)}
    guest.adapted.add(1, read_adapter([path], guest.model, most_bytes=lambda: 1 << 30))
    with pytest.raises(ModelRefused, match=reason):
        assert not any(check_adapted(guest, 1))
    guest.adapted.remove(1)
    assert {name for name, module in guest.model.named_modules() if "forward" in vars(module)} == before
    assert not any(module._forward_pre_hooks for module in guest.model.modules())


def test_a_layer_whose_weights_are_read_by_other_code_is_refused(tmp_path: Path) -> None:
    model = ARCHS["llama"].build()
    layer = model.get_submodule("model.layers.1.mlp")

    def forward(x: Tensor) -> Tensor:
        up = nn.functional.linear(x, layer.up_proj.weight)  # type: ignore[union-attr, arg-type]
        return layer.down_proj(nn.functional.silu(layer.gate_proj(x)) * up)  # type: ignore[operator]

    layer.forward = forward
    path = saved(tmp_path / "a", layers_of(model, ends_with("up_proj")), target_modules=["up_proj"])
    refused(model, path, "the layer model.layers.1.mlp.up_proj is not called as a module")


def test_a_layer_that_expands_all_latents_is_refused(tmp_path: Path) -> None:
    model = ARCHS["deepseek-v2"].build()
    path = saved(tmp_path / "a", layers_of(model, ends_with("kv_b_proj")), target_modules=["kv_b_proj"])
    refused(model, path, r"the layer model.layers.0.self_attn.kv_b_proj cannot have an adapter: it reads \d+ rows in a")


class Sorted(nn.Module):
    """Runs a layer on the rows in another order, or on some of them, as experts do."""

    def __init__(self, layer: nn.Linear, *, most: int | None) -> None:
        super().__init__()
        self.inner, self.most = layer, most

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        order = rows[:, 0].argsort()
        out = nn.functional.linear(rows, self.inner.weight)
        out[order[: self.most]] = self.inner(rows[order[: self.most]])
        return out.view(*x.shape[:-1], -1)


@pytest.mark.parametrize(("most", "reason"), [(None, "logits of a batch differ"), (1, "reads 1 rows in a step of")])
def test_a_layer_that_gets_other_rows_than_the_step_has_is_refused(
    most: int | None, reason: str, tmp_path: Path
) -> None:
    model = ARCHS["llama"].build()
    mlp = model.get_submodule("model.layers.1.mlp")
    mlp.down_proj = Sorted(mlp.down_proj, most=most)  # type: ignore[arg-type]
    path = saved(tmp_path / "a", layers_of(model, ends_with("inner")), target_modules=["inner"], strength=2.0)
    refused(model, path, reason)
