"""A network that somebody gave is his again, to the bit, once the last who served it has gone; meanwhile it says so."""

import copy
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcellar import BadRequest, CapacityTooSmall, Engine, ModelRefused
from kvcellar.attention.choose import backends
from kvcellar.engine.diagnosis import diagnose
from kvcellar.engine.loop import Loop
from kvcellar.engine.settings import Settings
from kvcellar.engine.verify import verify
from kvcellar.errors import EngineFailed, WrongStage
from kvcellar.models import guest as guests
from kvcellar.models.guest import Guest, Verdict, adopt
from kvcellar.models.mixers import Mixed
from tests.models.timeline import BOUND, read, relative, small_memory
from tests.zoo import ARCHS

SMALL: dict[str, Any] = {"cache_bytes": 4_000_000, "context": 64, "threads": 1}
TEXT = [5, 9, 14, 20, 11, 8, 30, 41]
# flat; tied weights; windows; configs in configs, solo; convolutions; scans with attention; scans alone
NAMES = ("llama", "gpt2", "gemma3", "bloom", "mpt", "lfm2", "qwen3-next", "mamba2")


def owned(name: str) -> PreTrainedModel:
    """As its owner has it: with an attention of his own choice, some layers in training, some weights frozen."""
    model = ARCHS[name].build().eval()
    if model._can_set_attn_implementation() and model._supports_sdpa:
        model.set_attn_implementation("sdpa")
    *_, last = model.modules()
    last.train()
    next(model.parameters()).requires_grad_(False)
    return model


def everything(model: PreTrainedModel) -> list[Any]:
    """What one can see of a network from outside, by identity where that matters."""
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

    def refused(why: type[Exception], **settings: Any) -> Callable[[], None]:
        def use() -> None:
            with pytest.raises(why):
                Engine(model, **SMALL | settings)

        return use

    assert_untouched_by(model, refused(CapacityTooSmall, cache_bytes=100))
    assert_untouched_by(model, refused(BadRequest, context=10**6))
    assert_untouched_by(model, refused(BadRequest, attention="magic"))
    with mock.patch.object(guests, "_verdict", return_value=Verdict(1.0, BOUND)):
        assert_untouched_by(model, refused(ModelRefused))
    with mock.patch.object(Loop, "start", side_effect=RuntimeError("can't start new thread")):
        assert_untouched_by(model, refused(RuntimeError))


def test_so_do_those_who_only_look() -> None:
    model = owned("llama")
    assert_untouched_by(model, lambda: str(diagnose(model, Settings(**SMALL), kv_quality=False)) and None)
    assert_untouched_by(model, lambda: str(verify(model, tokens=8, quality=False)) and None)


def test_an_engine_that_breaks_leaves_the_network_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = owned("llama")

    def use() -> None:
        monkeypatch.setattr(logging.getLogger("kvcellar.engine"), "disabled", True)
        engine = Engine(model, **SMALL)
        with mock.patch.object(Loop, "_turn", side_effect=ZeroDivisionError), pytest.raises(EngineFailed):
            engine.generate(TEXT, max_tokens=2)
        engine.close()

    assert_untouched_by(model, use)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this torch has no oneDNN")
def test_weights_are_not_there_twice_while_they_are_packed() -> None:
    """Those of which there are elements are somebody else's, too: an embedding's."""
    model = ARCHS["llama"].build()
    linears = {name: module.weight for name, module in model.named_modules() if type(module) is torch.nn.Linear}
    with Engine(model, **SMALL) as engine:
        assert engine._built.packing is not None
        assert engine._built.packing.layers == len(linears) > 0
        held = {name for name, weight in linears.items() if weight.numel()}
        assert held == {name for name, weight in linears.items() if weight is model.get_input_embeddings().weight}
    assert all(weight.numel() for weight in linears.values())


@pytest.mark.parametrize("kind", ["lfm2", "qwen3-next", "mamba2"])
def test_who_stands_in_for_a_mixer_stands_there_again(kind: str) -> None:
    """As accelerate does, whose hooks move weights between devices."""
    served, model = ARCHS[kind].build(), ARCHS[kind].build()
    guest = adopt(served, backends())
    name = next(name for name, module in served.named_modules() if module in guest.shape.mixers)
    mixer = model.get_submodule(name)
    own, calls = mixer.forward, []

    def heard(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return own(*args, **kwargs)

    mixer.forward = heard
    with Engine(model, **SMALL) as engine:
        assert isinstance(vars(mixer)["forward"], Mixed)
        calls.clear()
        engine.generate(TEXT, max_tokens=2)
        assert calls
    assert vars(mixer)["forward"] is heard


# -- meanwhile --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_a_served_network_answers_nobody_else_and_says_why(name: str, packed: bool) -> None:
    model = owned(name)
    said = answers(model)
    with Engine(model, pack=packed, **SMALL) as engine:
        before = engine.generate(TEXT, max_tokens=5, temperature=0).token_ids
        with pytest.raises(WrongStage, match="close the engine"):
            model(torch.tensor([TEXT]))
        with pytest.raises(WrongStage, match="close the engine"):
            model.generate(torch.tensor([TEXT]), max_new_tokens=2)
        with pytest.raises(WrongStage, match="cannot be copied"):
            copy.deepcopy(model)
        assert engine.generate(TEXT, max_tokens=5, temperature=0).token_ids == before
    assert all(torch.equal(now, then) for now, then in zip(answers(copy.deepcopy(model)), said, strict=True))


def test_a_network_is_its_owners_when_the_last_engine_is_closed() -> None:
    model = owned("llama")

    def use() -> None:
        first, second = Engine(model, **SMALL), Engine(model, **SMALL)
        said = first.generate(TEXT, max_tokens=5, temperature=0).token_ids
        first.close()
        assert second.generate(TEXT, max_tokens=5, temperature=0).token_ids == said
        with pytest.raises(WrongStage):
            model(torch.tensor([TEXT]))
        with pytest.raises(CapacityTooSmall):
            Engine(model, **SMALL | {"cache_bytes": 100})
        assert second.generate(TEXT, max_tokens=5, temperature=0).token_ids == said
        second.close()
        second.close()

    assert_untouched_by(model, use)


def test_guests_that_store_otherwise_leave_with_the_one_they_come_from() -> None:
    model = owned("llama")

    def use() -> None:
        with Engine(model, kv_dtype="int8", **SMALL) as engine:
            engine.generate(TEXT, max_tokens=2)

    assert_untouched_by(model, use)


def test_a_forgotten_guest_keeps_nobody_from_leaving() -> None:
    model = owned("llama")

    def use() -> None:
        adopt(model, backends())
        adopt(model, backends()).release()

    assert_untouched_by(model, use)


def never(mode: str) -> Callable[..., Verdict]:
    return lambda guest, trial: Verdict(float(guest.mode == mode), BOUND)


def heard(guest: Guest) -> Tensor:
    memory = small_memory(guest, 40)
    return torch.cat([*read(guest, memory, (1, TEXT[:5])), *read(guest, memory, (1, TEXT[5:]))])


def test_a_flat_guest_stays_right_where_a_second_one_could_only_run_solo() -> None:
    model = owned("llama")
    first = adopt(model, backends())
    said = heard(first)
    with (
        mock.patch.object(guests, "_verdict", never("flat")),
        pytest.raises(ModelRefused, match="solo: it has a guest that runs it flat"),
    ):
        adopt(model, backends())
    assert relative(heard(first), said) == 0
    first.release()
    with mock.patch.object(guests, "_verdict", never("flat")):
        assert adopt(model, backends()).mode == "solo"


def test_a_solo_guest_stays_right_where_a_second_one_could_run_flat() -> None:
    model = owned("llama")
    with mock.patch.object(guests, "_verdict", never("flat")):
        first = adopt(model, backends())
    said = heard(first)
    second = adopt(model, backends())
    assert (second.mode, second.refused) == ("solo", first.refused)
    assert relative(heard(first), said) == relative(heard(second), said) == 0
