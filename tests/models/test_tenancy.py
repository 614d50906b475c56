"""A network that somebody gave is his again, to the bit, once the last who served it has gone; meanwhile it says so."""

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kvcellar import BadRequest, CapacityTooSmall, Engine, ModelRefused
from kvcellar.attention.choose import backends
from kvcellar.engine import build as builds
from kvcellar.engine import engine as engines
from kvcellar.engine.loop import Loop
from kvcellar.engine.settings import Settings
from kvcellar.errors import EngineFailed, WrongStage
from kvcellar.models import adopt as adoption
from kvcellar.models.adopt import adopt
from kvcellar.models.guest import Guest, Verdict
from kvcellar.models.mixers import Mixed
from kvcellar.models.packed import PackedLinear, Packing, unpack
from kvcellar.models.tenancy import Tenancy, Tenant
from kvcellar.verify.diagnosis import diagnose
from kvcellar.verify.run import verify
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

    def refused(why: type[BaseException], **settings: Any) -> Callable[[], None]:
        def use() -> None:
            with pytest.raises(why):
                Engine(model, **SMALL | settings)

        return use

    assert_untouched_by(model, refused(CapacityTooSmall, cache_bytes=100))
    assert_untouched_by(model, refused(BadRequest, context=10**6))
    assert_untouched_by(model, refused(BadRequest, attention="magic"))
    with mock.patch.object(adoption, "verdict_of", return_value=Verdict(1.0, BOUND)):
        assert_untouched_by(model, refused(ModelRefused))
    with mock.patch.object(Loop, "start", side_effect=RuntimeError("can't start new thread")):
        assert_untouched_by(model, refused(RuntimeError))
    with mock.patch.object(Loop, "start", side_effect=KeyboardInterrupt):
        assert_untouched_by(model, refused(KeyboardInterrupt))
    with mock.patch.object(engines, "model_card", side_effect=ZeroDivisionError):
        assert_untouched_by(model, refused(ZeroDivisionError))


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


UP, LOWER = "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj"


def flat_buffer(model: PreTrainedModel) -> list[str]:
    """Two weights in one tensor, as trainers keep them."""
    both = [model.get_submodule(name) for name in (UP, LOWER)]
    buffer = torch.cat([linear.weight.detach().flatten() for linear in both])
    for linear, part in zip(both, buffer.chunk(2), strict=True):
        linear.weight.data = part.view_as(linear.weight)
    return [UP, LOWER]


def part_of_more(model: PreTrainedModel) -> list[str]:
    weight = model.get_submodule(UP).weight
    weight.data = torch.cat([weight.detach(), torch.zeros(1, weight.shape[1])])[:-1]
    return [UP]


def two_parameters(model: PreTrainedModel) -> list[str]:
    model.get_submodule(UP).weight = torch.nn.Parameter(model.get_submodule(LOWER).weight.data)
    return [UP, LOWER]


def a_buffer(model: PreTrainedModel) -> list[str]:
    linear = model.get_submodule(UP)
    linear.register_buffer("seen", linear.weight.data)
    return [UP]


def otherwise_laid_out(model: PreTrainedModel) -> list[str]:
    weight = model.get_submodule(UP).weight
    weight.data = weight.detach().t().contiguous().t()
    return [UP]


def in_shared_memory(model: PreTrainedModel) -> list[str]:
    model.share_memory()
    return [name for name, module in model.named_modules() if type(module) is torch.nn.Linear]


@pytest.mark.parametrize(
    "share", [flat_buffer, part_of_more, two_parameters, a_buffer, otherwise_laid_out, in_shared_memory]
)
def test_weights_that_others_see_stay_where_they_are(share: Callable[[PreTrainedModel], list[str]]) -> None:
    model = ARCHS["llama"].build()
    kept = [f"{name}.weight" for name in share(model)]
    before = seen_of(model)
    with Engine(model, **SMALL) as engine:
        assert engine._built.packing is not None
        assert engine._built.packing.layers > 4
    after = seen_of(model)
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}


def seen_of(model: PreTrainedModel) -> dict[str, Any]:
    named = model.named_parameters(remove_duplicate=False)
    return {name: (weight.data_ptr(), weight.stride(), weight.is_shared()) for name, weight in named}


def test_a_layer_that_cannot_be_put_back_keeps_no_other_from_it() -> None:
    model = owned("llama")
    engine = Engine(model, **SMALL)
    packed = model.get_submodule("model.layers.0.mlp.up_proj")
    assert isinstance(packed, PackedLinear)
    with mock.patch.object(PackedLinear, "weight", property(lambda self: memory_of(self, packed))):
        with pytest.raises(ExceptionGroup, match="could not be put back"):
            engine._built.leave()
    assert [module for module in model.modules() if isinstance(module, PackedLinear)] == [packed]
    assert all(weight.numel() for weight in model.parameters())
    answers(model)
    engine.close()


def memory_of(layer: PackedLinear, not_of: object) -> Tensor:
    if layer is not_of:
        raise RuntimeError("not enough memory")
    return layer.packed.to_dense()


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


def lossy(model: PreTrainedModel, place: Path) -> list[Callable[[], Any]]:
    """What goes through parameters, and would pass the weights of packed layers over."""
    packed = next(module for module in model.modules() if isinstance(module, PackedLinear))
    return [
        model.state_dict,
        lambda: model.save_pretrained(place),
        lambda: packed.load_state_dict({"weight": packed.weight}),
        lambda: packed.to(torch.float16),
    ]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm2"])
def test_a_served_network_answers_nobody_else_and_says_why(name: str, packed: bool, tmp_path: Path) -> None:
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
        if packed:
            for lose in lossy(model, tmp_path):
                with pytest.raises(WrongStage, match="close its engine"):
                    lose()
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


class Watched:
    """A lock that knows whether it is held, and how often it was taken. Nobody else is there."""

    def __init__(self) -> None:
        self.held, self.taken = 0, 0

    def __enter__(self) -> None:
        self.held, self.taken = self.held + 1, self.taken + 1

    def __exit__(self, *_: object) -> None:
        self.held -= 1


def watched(guest: Guest, monkeypatch: pytest.MonkeyPatch) -> tuple[Watched, list[bool]]:
    """The lock of its network, and of every call of that from now on whether the lock was held."""
    lock, calls = Watched(), []
    monkeypatch.setattr(guest._tenancy, "_lock", lock)
    guest.model.register_forward_pre_hook(lambda *_: calls.append(lock.held > 0))
    return lock, calls


def test_a_network_is_run_and_changed_by_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one runs it while another tests it with its own attention, and answers wrongly."""
    model = owned("llama")
    first = adopt(model, backends())
    lock, calls = watched(first, monkeypatch)
    heard(first)
    assert lock.taken == len(calls) == 2
    changes: list[bool] = []
    real = type(model).set_attn_implementation

    def changed(self: PreTrainedModel, name: Any) -> None:
        changes.append(lock.held > 0)
        real(self, name)

    monkeypatch.setattr(type(model), "set_attn_implementation", changed)
    packing = builds.pack

    def packs(*args: Any, **kwargs: Any) -> Packing:
        changes.append(lock.held > 0)
        return packing(*args, **kwargs)

    def unpacks(packed: Packing) -> None:
        changes.append(lock.held > 0)
        unpack(packed)

    monkeypatch.setattr(builds, "pack", packs)
    monkeypatch.setattr(builds, "unpack", unpacks)
    verify(model, tokens=8, quality=False)
    with Engine(model, **SMALL) as engine:
        engine.generate(TEXT, max_tokens=2)
    first.release()
    assert len(calls) > 10
    assert all(calls)
    assert len(changes) > 5
    assert all(changes)
    assert type(model.get_submodule("model.layers.0.mlp.up_proj")) is torch.nn.Linear


@pytest.mark.parametrize("succeeds", [True, False])
def test_an_engine_may_be_closed_while_another_is_built(succeeds: bool) -> None:
    model = owned("llama")
    real = adoption.trial_of

    def use() -> None:
        first = Engine(model, **SMALL)
        said = first.generate(TEXT, max_tokens=5, temperature=0).token_ids

        def trial(*args: Any, **kwargs: Any) -> Any:
            first.close()
            if not succeeds:
                raise RuntimeError("its own forward cannot stand it")
            return real(*args, **kwargs)

        with mock.patch.object(adoption, "trial_of", trial):
            if not succeeds:
                with pytest.raises(ModelRefused):
                    Engine(model, **SMALL)
                return
            second = Engine(model, **SMALL)
        assert second.generate(TEXT, max_tokens=5, temperature=0).token_ids == said
        with pytest.raises(WrongStage, match="close the engine"):
            model(torch.tensor([TEXT]))
        second.close()

    assert_untouched_by(model, use)


def test_an_engine_may_be_closed_while_another_is_packed() -> None:
    model = owned("llama")
    real = builds.pack

    def use() -> None:
        first = Engine(model, **SMALL)
        said = first.generate(TEXT, max_tokens=5, temperature=0).token_ids

        def packs(*args: Any, **kwargs: Any) -> Packing:
            first.close()
            return real(*args, **kwargs)

        with mock.patch.object(builds, "pack", packs), Engine(model, **SMALL) as second:
            assert second.generate(TEXT, max_tokens=5, temperature=0).token_ids == said

    assert_untouched_by(model, use)


def test_a_visit_that_comes_too_late_begins_anew() -> None:
    """The record that it found has ended before it was inside."""
    model = owned("llama")
    admits = Tenancy._admits
    ended: list[Tenancy] = []

    def late(self: Tenancy, visitor: Tenant) -> bool:
        if not ended:
            ended.append(self)
            with mock.patch.object(Tenancy, "_admits", admits), Tenancy.visited(model) as other:
                assert other is self
        return admits(self, visitor)

    def use() -> None:
        with mock.patch.object(Tenancy, "_admits", late), Tenancy.visited(model) as tenancy:
            assert tenancy is not ended[0]
            model.train()

    assert_untouched_by(model, use)
    assert ended


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
        mock.patch.object(adoption, "verdict_of", never("flat")),
        pytest.raises(ModelRefused, match="solo: it has a guest that runs it flat"),
    ):
        adopt(model, backends())
    assert relative(heard(first), said) == 0
    first.release()
    with mock.patch.object(adoption, "verdict_of", never("flat")):
        assert adopt(model, backends()).mode == "solo"


def test_a_solo_guest_stays_right_where_a_second_one_could_run_flat() -> None:
    model = owned("llama")
    with mock.patch.object(adoption, "verdict_of", never("flat")):
        first = adopt(model, backends())
    said = heard(first)
    second = adopt(model, backends())
    assert (second.mode, second.refused) == ("solo", first.refused)
    assert relative(heard(first), said) == relative(heard(second), said) == 0
