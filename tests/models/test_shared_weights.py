"""A network that the caller built is served through a copy on the same weights, and stays unchanged."""

import copy
import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcellar import BadRequest, CapacityTooSmall, Engine, ModelRefused
from kvcellar.engine.core.loop import Loop
from kvcellar.engine.load.settings import Settings
from kvcellar.engine.models import build_guest as guest_building
from kvcellar.engine.models.guest import Verdict
from kvcellar.engine.models.load import sharing_weights
from kvcellar.errors import EngineFailed
from kvcellar.frontend import thread_client
from kvcellar.kernels.layers import PanelWeight
from kvcellar.kernels.packed import LINEARS
from kvcellar.verify.diagnosis import diagnose
from kvcellar.verify.run import verify
from tests.models.timeline import BOUND
from tests.zoo import ARCHS

PACKS = torch.backends.mkldnn.is_available()
SMALL: dict[str, Any] = {"cache_bytes": 24_000_000, "context": 64, "threads": 1}
TEXT = [5, 9, 14, 20, 11, 8, 30, 41]
# flat; tied weights; windows; configs in configs, solo; convolutions; scans with attention; scans alone
NAMES = ("llama", "gpt2", "gemma3", "bloom", "mpt", "lfm2", "qwen3-next", "mamba2")


def owned(name: str) -> PreTrainedModel:
    """With its own attention, a layer in train mode, a frozen weight."""
    model = ARCHS[name].build().eval()
    if model._can_set_attn_implementation() and model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    *_, last = model.modules()
    last.train()
    next(model.parameters()).requires_grad_(False)
    return model


def everything(model: PreTrainedModel) -> list[Any]:
    """The state of a network: modules and parameters by identity, weights by value, modes, configs."""
    return [
        *((name, id(module), module.training, *sorted(vars(module))) for name, module in model.named_modules()),
        *((name, id(weight), weight.shape, weight.requires_grad) for name, weight in model.named_parameters()),
        *((name, value.clone().flatten().tolist()) for name, value in model.state_dict().items()),
        model.config.to_dict(),
        model.config._attn_implementation,
        *(getattr(model.config, name)._attn_implementation for name in model.config.sub_configs),
    ]


def own_outputs(model: PreTrainedModel) -> list[Tensor]:
    """Its own logits, and the tokens that its own `generate` returns."""
    ids = torch.tensor([TEXT])
    with torch.no_grad():
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_logits=True,
        )
        return [model(input_ids=ids, use_cache=False).logits, made.sequences, *made.logits]


def assert_untouched_by(model: PreTrainedModel, use: Callable[[], None]) -> None:
    outputs, state = own_outputs(model), everything(model)
    use()
    assert everything(model) == state
    assert all(torch.equal(now, then) for now, then in zip(own_outputs(model), outputs, strict=True))


@pytest.mark.parametrize("name", ["llama", "gpt2", "lfm2"])
def test_an_engine_that_cannot_be_built_leaves_the_network_unchanged(name: str) -> None:
    model = owned(name)

    def refused(why: type[BaseException], **settings: Any) -> None:
        state = everything(model)
        with pytest.raises(why):
            Engine(model, **SMALL | settings)
        assert everything(model) == state

    def use() -> None:
        refused(CapacityTooSmall, cache_bytes=100)
        refused(BadRequest, context=10**6)
        refused(BadRequest, attention="magic")
        with mock.patch.object(guest_building, "whole_step_test", return_value=Verdict(1.0, BOUND)):
            refused(ModelRefused)
        with mock.patch.object(Loop, "start", side_effect=RuntimeError("can't start new thread")):
            refused(RuntimeError)
        with mock.patch.object(thread_client, "card_of", side_effect=KeyboardInterrupt):
            refused(KeyboardInterrupt)

    assert_untouched_by(model, use)


def test_doctor_and_verify_leave_the_network_unchanged() -> None:
    model = owned("llama")

    def use() -> None:
        notes = diagnose(model, Settings(**SMALL), kv_quality=False).notes
        assert any("in copies beside the weights of the given network" in note for note in notes) == PACKS
        verify(model, tokens=8, quality=False)

    assert_untouched_by(model, use)


def test_an_engine_that_fails_leaves_the_network_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    model = owned("llama")

    def use() -> None:
        monkeypatch.setattr(logging.getLogger("kvcellar.engine"), "disabled", True)
        engine = Engine(model, **SMALL)
        with mock.patch.object(Loop, "_step", side_effect=ZeroDivisionError), pytest.raises(EngineFailed):
            engine.generate(TEXT, max_tokens=2)
        engine.close()

    assert_untouched_by(model, use)


def greedy(engine: Engine) -> tuple[int, ...]:
    return engine.generate(TEXT, max_tokens=5, temperature=0).token_ids


# -- while it is served -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_served_network_is_unchanged(name: str, tmp_path: Path) -> None:
    """It can be called, saved and copied while the engine runs and afterwards."""
    model = owned(name)
    outputs, saved = own_outputs(model), files(model, tmp_path / "before")
    state = everything(model)
    with Engine(model, **SMALL) as engine:
        before = greedy(engine)
        assert everything(model) == state
        assert files(model, tmp_path / "while") == saved
        for one in (model, copy.deepcopy(model)):
            assert all(torch.equal(now, then) for now, then in zip(own_outputs(one), outputs, strict=True))
        assert greedy(engine) == before
    assert everything(model) == state
    assert all(torch.equal(now, then) for now, then in zip(own_outputs(model), outputs, strict=True))


def files(model: PreTrainedModel, place: Path) -> dict[str, bytes]:
    model.save_pretrained(place)
    return {file.name: file.read_bytes() for file in place.iterdir()}


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "lfm2"])
def test_changes_to_the_network_do_not_affect_its_engine(name: str, pack: bool) -> None:
    """Modes, gradients, dtype, device, attention: everything but the values of weights."""
    model = owned(name)
    with Engine(model, pack=pack, **SMALL) as engine:
        before = greedy(engine)
        model.train().requires_grad_(True)
        model.set_attn_implementation("eager")
        assert greedy(engine) == before
        loss = model(input_ids=torch.tensor([TEXT]), labels=torch.tensor([TEXT])).loss
        loss.backward()
        assert greedy(engine) == before
        model.half().to("meta")
        assert greedy(engine) == before


def test_a_network_can_be_called_during_a_step_of_its_engine() -> None:
    model = owned("llama")
    outputs = own_outputs(model)
    inside, on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        inside.set()
        on.wait()

    with Engine(model, **SMALL) as engine, ThreadPoolExecutor(1) as pool:
        expected = greedy(engine)
        hook = engine._built.guest.model.register_forward_pre_hook(wait)
        completion = pool.submit(greedy, engine)
        inside.wait()
        try:
            assert all(torch.equal(now, then) for now, then in zip(own_outputs(model), outputs, strict=True))
        finally:
            hook.remove()
            on.set()
        assert completion.result() == expected


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_engines_on_one_network_are_independent(name: str) -> None:
    """In the same mode or not, closed or refused."""
    model = owned(name)

    def use() -> None:
        with Engine(model, **SMALL) as first:
            outputs = greedy(first)
            with mock.patch.object(guest_building, "whole_step_test", never("flat")):
                second = Engine(model, **SMALL)
            assert (first.model.mode, second.model.mode) == ("flat", "solo")
            with (
                mock.patch.object(guest_building, "whole_step_test", return_value=Verdict(1.0, BOUND)),
                pytest.raises(ModelRefused),
            ):
                Engine(model, **SMALL)
            assert greedy(first) == greedy(second) == outputs
            second.close()
            assert greedy(first) == outputs

    assert_untouched_by(model, use)


def never(mode: str) -> Callable[..., Verdict]:
    return lambda guest, trial: Verdict(float(guest.mode == mode), BOUND)


# -- the copy ---------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not PACKS, reason="this torch has no oneDNN")
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_only_packed_copies_take_memory(name: str) -> None:
    model = owned(name)
    model.register_buffer("table", torch.ones(3))
    model.plain = torch.ones(3)
    with Engine(model, **SMALL) as engine:
        network = engine._built.guest.model
        packed = {name for name, module in network.named_modules() if isinstance(module, LINEARS)}
        assert packed == {name for name, module in model.named_modules() if type(module) is nn.Linear}
        held = {name: weight.data_ptr() for name, weight in model.named_parameters(remove_duplicate=False)}
        for name, weight in network.named_parameters(remove_duplicate=False):
            assert isinstance(weight, PanelWeight) or weight.data_ptr() == held[name]
            assert not weight.requires_grad
        assert network.get_buffer("table") is model.table
        assert network.plain is model.plain


class Strange(nn.Parameter):
    """As quantisation libraries use."""


def test_parameters_of_a_subclass_are_shared_as_objects() -> None:
    layer = nn.Linear(2, 2)
    layer.weight = Strange(torch.ones(2, 2))
    twin = sharing_weights(layer)
    assert twin.weight is layer.weight
    assert twin.bias is not layer.bias
    assert layer.weight.requires_grad


def test_tied_weights_are_tied_in_the_copy() -> None:
    model = ARCHS["llama"].build(tie_word_embeddings=True)
    twin = sharing_weights(model)
    assert twin.lm_head.weight is twin.get_input_embeddings().weight
    assert len(list(twin.parameters())) == len(list(model.parameters()))


def test_inference_tensors_are_served() -> None:
    with torch.inference_mode():
        model = ARCHS["llama"].build()
    with Engine(model, **SMALL) as engine:
        assert len(greedy(engine)) == 5


def test_a_network_that_cannot_be_copied_is_refused() -> None:
    model = owned("llama")
    model.lock = threading.Lock()
    with pytest.raises(ModelRefused, match=r"LlamaForCausalLM cannot be served: its modules cannot be copied: .*lock"):
        Engine(model, **SMALL)


@pytest.mark.parametrize("kind", ["lfm2", "qwen3-next", "mamba2"])
def test_a_replaced_forward_of_a_mixer_is_called(kind: str) -> None:
    """As accelerate does, whose hooks move weights between devices."""
    with Engine(ARCHS[kind].build(), **SMALL) as engine:
        expected, shape = greedy(engine), engine._built.guest.shape
        names = [name for name, module in engine._built.guest.model.named_modules() if module in shape.mixers]
    model = ARCHS[kind].build()
    mixer = model.get_submodule(names[0])
    own, calls = mixer.forward, []

    def replacement(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return own(*args, **kwargs)

    mixer.forward = replacement
    with Engine(model, **SMALL) as engine:
        calls.clear()
        assert greedy(engine) == expected
        assert calls
    assert vars(mixer)["forward"] is replacement
