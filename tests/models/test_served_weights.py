"""Networks whose linear layers multiply codes: which layers do, what they compute, and what they take in memory."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.kernels.compiled import NotCompiled
from kvcellar.kernels.quantised import Kernel, QuantisedLinear
from kvcellar.models.load import Loaded, load
from kvcellar.models.quantize.chosen import choose
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
