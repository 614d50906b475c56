"""Networks whose linear layers multiply codes: which layers do, what they compute, and what they take in memory."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.quantised import Kernel, QuantisedLinear
from kvcellar.models.load import Loaded, load
from kvcellar.models.quantize.chosen import choose
from kvcellar.models.quantize.directory import quantize_directory
from kvcellar.models.selftest import judged_as
from kvcellar.models.weights_files import opened
from kvcellar.models.weights_loading import targets_of
from tests.kernels.rounded import Emulated
from tests.models.quantised import saved
from tests.zoo import ARCHS, reference_logits

TOKENS = list(range(3, 40))
KINDS = ("int8", "int4", "mixed")


@pytest.fixture(scope="module", autouse=True)
def compiled() -> None:
    try:
        Kernel(os.environ)
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
    assert sum(loaded.served.layers.values()) == len(quantised_layers(loaded.model)) > 3
    assert loaded.parameters == load(path).parameters
    assert logits_as_float64(loaded).isfinite().all()


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
