"""A network that the caller built is served through a copy on the same weights, and is never changed itself."""

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
from kvcellar.engine import engine as engines
from kvcellar.engine.loop import Loop
from kvcellar.engine.settings import Settings
from kvcellar.errors import EngineFailed
from kvcellar.kernels.packed import PackedLinear
from kvcellar.models import build_guest as guest_building
from kvcellar.models.guest import Verdict
from kvcellar.models.shared_weights import sharing_weights
from kvcellar.verify.diagnosis import diagnose
from kvcellar.verify.run import verify
from tests.models.timeline import BOUND
from tests.zoo import ARCHS

PACKS = torch.backends.mkldnn.is_available()
SMALL: dict[str, Any] = {"cache_bytes": 4_000_000, "context": 64, "threads": 1}
TEXT = [5, 9, 14, 20, 11, 8, 30, 41]
# flat; tied weights; windows; configs in configs, solo; convolutions; scans with attention; scans alone
NAMES = ("llama", "gpt2", "gemma3", "bloom", "mpt", "lfm2", "qwen3-next", "mamba2")


def owned(name: str) -> PreTrainedModel:
    """With another attention than ours, a layer in train mode, a frozen weight."""
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


def answers(model: PreTrainedModel) -> list[Tensor]:
    """Its own logits, and what its own `generate` makes of them."""
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
    said, seen = answers(model), everything(model)
    use()
    assert everything(model) == seen
    assert all(torch.equal(now, then) for now, then in zip(answers(model), said, strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_a_closed_engine_leaves_a_network_as_it_was(name: str) -> None:
    model = owned(name)

    def use() -> None:
        with Engine(model, **SMALL) as engine:
            engine.generate(TEXT, max_tokens=5, temperature=0)

    assert_untouched_by(model, use)


@pytest.mark.parametrize("name", ["llama", "gpt2", "lfm2"])
def test_so_does_an_engine_that_cannot_be_built(name: str) -> None:
    model = owned(name)

    def refused(why: type[BaseException], **settings: Any) -> None:
        seen = everything(model)
        with pytest.raises(why):
            Engine(model, **SMALL | settings)
        assert everything(model) == seen

    def use() -> None:
        refused(CapacityTooSmall, cache_bytes=100)
        refused(BadRequest, context=10**6)
        refused(BadRequest, attention="magic")
        with mock.patch.object(guest_building, "whole_step_test", return_value=Verdict(1.0, BOUND)):
            refused(ModelRefused)
        with mock.patch.object(Loop, "start", side_effect=RuntimeError("can't start new thread")):
            refused(RuntimeError)
        with mock.patch.object(engines, "model_card", side_effect=KeyboardInterrupt):
            refused(KeyboardInterrupt)

    assert_untouched_by(model, use)


def test_so_do_doctor_and_verify() -> None:
    model = owned("llama")

    def use() -> None:
        notes = diagnose(model, Settings(**SMALL), kv_quality=False).notes
        assert any("in copies beside the weights of the network that was given: " in note for note in notes) == PACKS
        verify(model, tokens=8, quality=False)

    assert_untouched_by(model, use)


def test_so_does_an_engine_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = owned("llama")

    def use() -> None:
        monkeypatch.setattr(logging.getLogger("kvcellar.engine"), "disabled", True)
        engine = Engine(model, **SMALL)
        with mock.patch.object(Loop, "_turn", side_effect=ZeroDivisionError), pytest.raises(EngineFailed):
            engine.generate(TEXT, max_tokens=2)
        engine.close()

    assert_untouched_by(model, use)


def greedy(engine: Engine) -> tuple[int, ...]:
    return engine.generate(TEXT, max_tokens=5, temperature=0).token_ids


# -- while it is served -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_served_network_is_what_it_was(name: str, tmp_path: Path) -> None:
    """It answers, and can be saved and copied; the engine goes on."""
    model = owned(name)
    said, saved = answers(model), files(model, tmp_path / "before")
    seen = everything(model)
    with Engine(model, **SMALL) as engine:
        before = greedy(engine)
        assert everything(model) == seen
        assert files(model, tmp_path / "while") == saved
        for one in (model, copy.deepcopy(model)):
            assert all(torch.equal(now, then) for now, then in zip(answers(one), said, strict=True))
        assert greedy(engine) == before
    assert everything(model) == seen


def files(model: PreTrainedModel, place: Path) -> dict[str, bytes]:
    model.save_pretrained(place)
    return {file.name: file.read_bytes() for file in place.iterdir()}


@pytest.mark.parametrize("pack", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("name", ["llama", "gpt2", "lfm2"])
def test_what_becomes_of_a_network_does_not_reach_its_engine(name: str, pack: bool) -> None:
    """Modes, gradients, dtype and place, attention: all but the values of weights."""
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


def test_a_network_answers_while_a_step_of_its_engine_runs() -> None:
    model = owned("llama")
    said = answers(model)
    inside, on = threading.Event(), threading.Event()

    def wait(*_: object) -> None:
        inside.set()
        on.wait()

    with Engine(model, **SMALL) as engine, ThreadPoolExecutor(1) as pool:
        expected = greedy(engine)
        hook = engine._built.guest.model.register_forward_pre_hook(wait)
        answer = pool.submit(greedy, engine)
        inside.wait()
        try:
            assert all(torch.equal(now, then) for now, then in zip(answers(model), said, strict=True))
        finally:
            hook.remove()
            on.set()
        assert answer.result() == expected


@pytest.mark.parametrize("name", ["llama", "lfm2"])
def test_engines_on_one_network_do_not_meet(name: str) -> None:
    """Whether they run it in the same way or not, are closed or are refused."""
    model = owned(name)

    def use() -> None:
        with Engine(model, **SMALL) as first:
            said = greedy(first)
            with mock.patch.object(guest_building, "whole_step_test", never("flat")):
                second = Engine(model, **SMALL)
            assert (first.model.mode, second.model.mode) == ("flat", "solo")
            with (
                mock.patch.object(guest_building, "whole_step_test", return_value=Verdict(1.0, BOUND)),
                pytest.raises(ModelRefused),
            ):
                Engine(model, **SMALL)
            assert greedy(first) == greedy(second) == said
            second.close()
            assert greedy(first) == said

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
        packed = {name for name, module in network.named_modules() if isinstance(module, PackedLinear)}
        assert packed == {name for name, module in model.named_modules() if type(module) is nn.Linear}
        held = {name: weight.data_ptr() for name, weight in model.named_parameters(remove_duplicate=False)}
        for name, weight in network.named_parameters(remove_duplicate=False):
            assert weight.data_ptr() == held[name]
            assert not weight.requires_grad
        assert network.get_buffer("table") is model.table
        assert network.plain is model.plain


class Strange(nn.Parameter):
    """As libraries that quantise have."""


def test_parameters_of_a_subclass_are_shared_as_they_are() -> None:
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


def test_weights_made_without_gradients_are_served() -> None:
    with torch.inference_mode():
        model = ARCHS["llama"].build()
    with Engine(model, **SMALL) as engine:
        assert len(greedy(engine)) == 5


def test_a_network_that_cannot_be_copied_is_refused_with_the_reason() -> None:
    model = owned("llama")
    model.lock = threading.Lock()
    with pytest.raises(ModelRefused, match=r"LlamaForCausalLM cannot be served: its modules cannot be copied: .*lock"):
        Engine(model, **SMALL)


@pytest.mark.parametrize("kind", ["lfm2", "qwen3-next", "mamba2"])
def test_a_mixer_whose_forward_was_replaced_is_called_through_the_replacement(kind: str) -> None:
    """As accelerate does, whose hooks move weights between devices."""
    with Engine(ARCHS[kind].build(), **SMALL) as engine:
        expected, shape = greedy(engine), engine._built.guest.shape
        names = [name for name, module in engine._built.guest.model.named_modules() if module in shape.mixers]
    model = ARCHS[kind].build()
    mixer = model.get_submodule(names[0])
    own, calls = mixer.forward, []

    def heard(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return own(*args, **kwargs)

    mixer.forward = heard
    with Engine(model, **SMALL) as engine:
        calls.clear()
        assert greedy(engine) == expected
        assert calls
    assert vars(mixer)["forward"] is heard
