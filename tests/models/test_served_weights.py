"""Networks whose linear layers multiply codes: which layers do, what they compute, and what they take in memory."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kvcellar.engine.models.load import Loaded, load
from kvcellar.engine.models.quantize.directory import quantize_directory
from kvcellar.engine.models.quantize.selection import choose
from kvcellar.engine.models.selftest import judged_as
from kvcellar.engine.models.weights.weights_files import opened
from kvcellar.engine.models.weights.weights_loading import fill, stacked_targets, targets_of
from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.kernels import quantised
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.layers import OwnExperts
from kvcellar.kernels.quantised import QuantisedKernel, QuantisedLinear
from tests.kernels.rounded import Emulated
from tests.models import foreign
from tests.models.quantised import saved, stored
from tests.zoo import ARCHS, reference_logits

TOKENS = list(range(3, 40))
KINDS = ("int8", "int4", "mixed")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    try:
        QuantisedKernel(os.environ)
    except NotCompiled as error:
        pytest.skip(f"not compiled here: {error}")


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return saved(tmp_path_factory.mktemp("llama") / "m")


def quantised_layers(model: nn.Module) -> dict[str, QuantisedLinear]:
    return {name: one for name, one in model.named_modules() if isinstance(one, QuantisedLinear)}


def logits_as_float64(loaded: Loaded) -> Tensor:
    """Logits, after each quantised layer's output was compared with that of float64 on the same inputs."""

    def compare(layer: QuantisedLinear, args: tuple[Tensor, ...], out: Tensor) -> None:
        expected = Emulated(layer)(args[0])
        assert (out - expected).abs().max() <= 2e-6 * expected.abs().max()

    layers = quantised_layers(loaded.model).values()
    hooks = [layer.register_forward_hook(compare) for layer in layers]
    logits = reference_logits(loaded.model, TOKENS)
    for hook in hooks:
        hook.remove()
    return logits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-moe", "lfm2", "mamba2"])
def test_a_network_quantised_at_load_computes_what_float64_does(tmp_path, name: str, kind: str) -> None:
    path = saved(tmp_path / "m", name, torch.float32)
    loaded = load(path, weights=kind)
    assert loaded.served is not None
    made = len(quantised_layers(loaded.model)) + len(experts_of(loaded.model))
    assert sum(loaded.served.layers.values()) == made > 3
    assert loaded.parameters == load(path).parameters
    assert logits_as_float64(loaded).isfinite().all()


def experts_of(model: nn.Module) -> dict[str, OwnExperts]:
    return {name: one for name, one in model.named_modules() if isinstance(one, OwnExperts)}


def gpt_oss_directory(path: Path) -> tuple[Path, dict[str, np.ndarray]]:
    """A model with experts in mxfp4, and what they are, [E,in,out]."""
    source = saved(path / "m", "gpt-oss", hidden_size=64, intermediate_size=96)
    draw, tensors, values = np.random.default_rng(2), dict[str, Tensor](), dict[str, np.ndarray]()
    for name, tensor in stored(source).items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            more, values[name] = foreign.gpt_oss(name, tuple(tensor.shape), draw)  # type: ignore[arg-type]
            tensors |= more
        else:
            tensors[name] = tensor
    return foreign.directory(source, path / "q", tensors, {"quant_method": "mxfp4"}), values


def compare_experts(loaded: Loaded) -> Tensor:
    """Logits, after each row of each layer of experts was compared with what float64 makes of it."""

    def compare(layer: OwnExperts, args: tuple[Any, ...], out: Tensor) -> None:
        x, index, share = args
        emulated = [Emulated(one) for one in layer.layers if isinstance(one, QuantisedLinear)]
        wanted = torch.cat([emulated[int(e)](x[i // share][None]) for i, e in enumerate(index)])
        assert (out - wanted).abs().max() <= 2e-6 * wanted.abs().max()

    hooks = [layer.register_forward_hook(compare) for layer in experts_of(loaded.model).values()]
    logits = reference_logits(loaded.model, TOKENS[:9])
    for hook in hooks:
        hook.remove()
    return logits


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_experts_are_multiplied_from_codes_made_at_load_or_by_create(tmp_path: Path, name: str) -> None:
    path = saved(tmp_path / "m", name, torch.float32)
    loaded, dense = load(path, weights="int4"), load(path)
    stacks = [one for one, weight in dense.model.named_parameters() if weight.dim() == 3]
    assert list(experts_of(loaded.model)) == [one for one, _ in loaded.model.named_modules() if one in stacks] != []
    assert not any(weight.dim() == 3 for weight in loaded.model.parameters())
    logits = compare_experts(loaded)
    quantize_directory(path, tmp_path / "q", "int4", measure=False)
    created = load(tmp_path / "q", weights="auto")
    assert experts_of(created.model).keys() == experts_of(loaded.model).keys()
    assert torch.equal(reference_logits(created.model, TOKENS[:9]), logits)
    weights = dict(load(tmp_path / "q").model.named_parameters())
    for place, layer in experts_of(created.model).items():
        for expert, one in enumerate(layer.layers):
            torch.testing.assert_close(one.weight, weights[place][expert])


def test_stacks_of_experts_with_codes_are_never_dense(tmp_path: Path) -> None:
    path = saved(tmp_path / "m", "qwen3-moe")
    with opened(path) as files:
        skeleton = load(path).model
        found = stacked_targets(skeleton, files)
        later = {name for experts in found.values() for names in experts for name in names}
        network, _ = fill(skeleton, torch.bfloat16, files, later=later)
    own = dict(network.named_parameters())
    assert found
    for target in found:
        assert own[target].untyped_storage().nbytes() == 2


def test_experts_of_gpt_oss_are_multiplied_from_their_codes(tmp_path: Path) -> None:
    path, values = gpt_oss_directory(tmp_path)
    loaded = load(path, weights="auto", dtype="float32")
    assert loaded.served is not None
    assert loaded.served.layers[4] == len(experts_of(loaded.model)) == len(values) > 0
    for place, layer in experts_of(loaded.model).items():
        for expert, one in enumerate(layer.layers):
            assert torch.equal(one.weight.T, torch.from_numpy(values[place][expert]))
    compare_experts(loaded)


def test_a_module_of_experts_one_of_which_has_no_codes_is_dense_with_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, values = gpt_oss_directory(tmp_path)
    monkeypatch.setattr(quantised, "unfit", lambda codes: "for a test" if codes.values.shape[1] == 96 else None)
    loaded = load(path, weights="auto", dtype="float32")
    assert not experts_of(loaded.model)
    own = dict(loaded.model.named_parameters())
    for place, value in values.items():
        assert torch.equal(own[place], torch.from_numpy(value))
    assert loaded.served is not None
    assert loaded.served.dense == dict.fromkeys(values, "for a test")
    assert loaded.served.identity == ""


def test_layers_that_create_leaves_stay_dense(directory: Path) -> None:
    with opened(directory) as files:
        skeleton = load(directory).model
        left, targets = choose(skeleton, files, "int8").left, targets_of(skeleton, files)
    layers = quantised_layers(load(directory, weights="int8").model)
    assert not {targets[name].removesuffix(".weight") for name in left} & layers.keys() - {"lm_head"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_given_network_is_quantised_as_its_files_are_and_stays_as_it_is(tmp_path: Path, kind: str) -> None:
    network = ARCHS["llama"].build()
    network.save_pretrained(tmp_path / "m")
    before = {name: one.clone() for name, one in network.state_dict().items()}
    loaded = load(network, weights=kind)
    expected = load(tmp_path / "m", weights=kind)
    assert torch.equal(reference_logits(loaded.model, TOKENS), reference_logits(expected.model, TOKENS))
    assert loaded.served == expected.served
    assert all(torch.equal(one, before[name]) for name, one in network.state_dict().items())
    assert not quantised_layers(network)


def test_a_tied_head_has_codes_and_the_embedding_its_weights(tmp_path: Path) -> None:
    path = saved(tmp_path / "m", vocab_size=128, tie_word_embeddings=True)
    loaded, dense = load(path, weights="int4"), load(path)
    assert isinstance(loaded.model.get_output_embeddings(), QuantisedLinear)
    assert torch.equal(loaded.model.get_input_embeddings().weight, dense.model.get_input_embeddings().weight)
    assert loaded.parameters == dense.parameters


def test_weights_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    network = ARCHS["llama"].build()
    network.get_submodule("model.layers.1.mlp.up_proj").weight.data[3, 5] = torch.nan
    network.save_pretrained(tmp_path / "m")
    with pytest.raises(ModelRefused, match=r"layers\.1\.mlp\.up_proj\.weight holds NaN"):
        load(tmp_path / "m", weights="int4")


def test_without_a_compiler_weights_are_not_quantised(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert load(directory, weights="auto").served is None
    with pytest.raises(BadRequest, match=r"weights cannot be int8: the kernel .* Use auto or dense"):
        load(directory, weights="int8")


@pytest.mark.parametrize("kind", KINDS)
def test_codes_made_at_load_are_those_that_create_writes(directory: Path, tmp_path: Path, kind: str) -> None:
    """Also with `weights=auto`, from the file."""
    into = tmp_path / "q"
    quantize_directory(directory, into, kind, measure=False)
    ours, theirs = (
        quantised_layers(load(directory, weights=kind).model),
        quantised_layers(load(into, weights="auto").model),
    )
    assert ours.keys() == theirs.keys()
    for name, layer in ours.items():
        assert layer.bits == theirs[name].bits
        assert torch.equal(layer.weight, theirs[name].weight)
    bits = {name: layer.bits for name, layer in ours.items()}
    assert bits.pop("lm_head") == 8
    assert set(bits.values()) == {"int8": {8}, "int4": {4}, "mixed": {4, 8}}[kind]


def test_a_model_with_quantised_weights_is_served_from_its_codes(directory: Path, tmp_path: Path) -> None:
    quantize_directory(directory, tmp_path / "q", "int4", measure=False)
    loaded = load(tmp_path / "q", weights="auto", dtype="float32")
    dense = load(tmp_path / "q", dtype="float32")
    layers = quantised_layers(loaded.model)
    assert dense.served is None
    assert not quantised_layers(dense.model)
    for name, layer in layers.items():
        expected: Any = dense.model.get_submodule(name).weight
        if name != "lm_head":
            torch.testing.assert_close(layer.weight, expected)
    assert logits_as_float64(loaded).isfinite().all()
    assert loaded.notes == dense.notes == ()


def test_only_codes_of_quantised_layers_are_in_memory(directory: Path, tmp_path: Path) -> None:
    """No layer keeps its stand-in, and none its dense weight."""
    quantize_directory(directory, tmp_path / "q", "int4", measure=False)
    loaded = load(tmp_path / "q", weights="auto")
    assert loaded.served is not None
    assert loaded.served.bytes == sum(one.nbytes for one in quantised_layers(loaded.model).values())
    assert not any("_proj" in name for name, _ in loaded.model.named_parameters())
    assert all(one.is_contiguous() for one in loaded.model.parameters())
    dense = sum(one.nbytes for name, one in load(directory).model.named_parameters() if "_proj" in name)
    head = loaded.model.get_submodule("lm_head")
    assert isinstance(head, QuantisedLinear)
    assert loaded.served.bytes - head.nbytes == dense * 9 // 32  # 4.5 bits of 16


def test_codes_that_memory_cannot_hold_are_refused(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At least 4 bits of each weight, beside what stays dense."""
    model, real = load(directory).model, os.sysconf
    sizes = [(one.numel() // 2 if "_proj" in name else one.nbytes) for name, one in model.named_parameters()]
    memory = sum(sizes) + sum(one.nbytes for one in model.buffers())
    monkeypatch.setattr(
        os, "sysconf", lambda name: {"SC_PAGE_SIZE": 1, "SC_PHYS_PAGES": memory}.get(name) or real(name)
    )
    assert load(directory, weights="int4").served is not None
    memory -= 1
    with pytest.raises(ModelRefused, match=f"need {memory + 1} bytes; this machine has {memory} bytes"):
        load(directory, weights="int4")


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_of_which_nothing_can_be_quantised_is_refused(tmp_path: Path, kind: str) -> None:
    """The weights of GPT-2's layers are transposed."""
    path = saved(tmp_path / "m", "gpt2")
    for model in (path, load(path).model):
        with pytest.raises(BadRequest, match=rf"weights cannot be {kind}: GPT2LMHeadModel has no .* Use auto or dense"):
            load(model, weights=kind)
    assert load(path, weights="auto").served is None


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_files_are_not_quantised_again(directory: Path, tmp_path: Path, kind: str) -> None:
    quantize_directory(directory, tmp_path / "q", "int8", measure=False)
    with pytest.raises(BadRequest, match=r"has quantised weights.*Use auto or dense"):
        load(tmp_path / "q", weights=kind)


def test_without_a_compiler_codes_are_decoded_and_a_setting_is_refused(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantize_directory(directory, tmp_path / "q", "int4", measure=False)
    monkeypatch.setenv("CXX", "no-such-compiler")
    loaded = load(tmp_path / "q", weights="auto")
    assert loaded.served is None
    assert "decoded when they are loaded: the kernel for quantised weights is not compiled" in loaded.notes[-1]
    assert torch.equal(reference_logits(loaded.model, TOKENS), reference_logits(load(tmp_path / "q").model, TOKENS))
    with pytest.raises(BadRequest, match=r"weights cannot be int8: the kernel .* Use auto or dense"):
        load(directory, weights="int8")


def test_a_network_with_rounded_inputs_is_judged_as_in_half_precision(directory: Path) -> None:
    """An ulp in an input can become a 127th of it, so no bound of float32 holds."""
    assert judged_as(load(directory, dtype="float32").model) is torch.float32
    assert judged_as(load(directory, dtype="float32", weights="int4").model) is torch.bfloat16
