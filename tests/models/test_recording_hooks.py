"""A network with code around its modules is run by its modules, so that this code runs in each step."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.mixers import wrap_mixers
from kvcellar.engine.recording.record import record
from kvcellar.engine.recording.recording import Hooks
from kvcellar.engine.recording.replay import Replay
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.zoo import ARCHS

LAYER = "model.layers.1.mlp.up_proj"


def halved(_: nn.Module, args: Any, out: Tensor) -> Tensor:
    return out / 2


@contextmanager
def own_forward(module: nn.Module) -> Iterator[None]:
    before = module.forward
    module.forward = lambda x: before(x) / 2
    yield
    del module.forward


@contextmanager
def hook(register: Callable[[Any], Any], of: Callable[..., Any]) -> Iterator[None]:
    handle = register(of)
    yield
    handle.remove()


AROUND: dict[str, Callable[[nn.Module], Any]] = {
    "forward hooks": lambda module: hook(module.register_forward_hook, halved),
    "forward hooks, which": lambda module: hook(module.register_forward_pre_hook, lambda _, args: (args[0] / 2,)),
    "a forward of its own": own_forward,
}


def recorded() -> Guest:
    guest = build_guest(ARCHS["llama"].build(), backends())
    record(guest, lambda program: Replay(program, guest.model))
    return guest


def logits(guest: Guest) -> Tensor:
    memory = guest.memory({group.name: 16 for group in guest.shape.groups})
    made = guest.forward(memory, memory.begin(Batch((Feed(0, Span(0, 5)),))), range(3, 8), range(5)).clone()
    memory.commit()
    return made


@pytest.mark.parametrize("kind", AROUND)
def test_a_network_with_code_around_a_module_is_not_recorded(kind: str) -> None:
    guest = build_guest(ARCHS["llama"].build(), backends())
    with AROUND[kind](guest.model.get_submodule(LAYER)):
        record(guest, lambda program: Replay(program, guest.model))
    assert guest.recording is None
    assert guest.not_recorded is not None
    assert f"its module {LAYER} has {kind}" in guest.not_recorded


@pytest.mark.parametrize("kind", AROUND)
def test_code_that_is_put_around_a_module_later_runs_until_it_is_removed(kind: str) -> None:
    guest = recorded()
    assert guest.recording is not None
    before = logits(guest)
    with AROUND[kind](guest.model.get_submodule(LAYER)):
        changed = logits(guest)
        assert (guest.recording.steps, guest.recording.by_modules) == (1, {"hooks of modules": 1})
    assert not torch.equal(changed, before)
    assert torch.equal(logits(guest), before)
    assert guest.recording.steps == 2


def test_hooks_of_all_modules_are_seen() -> None:
    guest = recorded()
    assert guest.recording is not None
    with hook(register_module_forward_hook, lambda module, args, out: None):
        logits(guest)
        record(guest, lambda program: Replay(program, guest.model))
    assert guest.recording.by_modules == {"hooks of modules": 1}
    assert guest.not_recorded is not None
    assert "torch has forward hooks for all modules" in guest.not_recorded


def test_what_transformers_leaves_on_a_network_that_returned_hidden_states_changes_nothing() -> None:
    model = ARCHS["llama"].build()
    model(torch.tensor([[3, 4]]), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    guest = build_guest(model, backends())
    record(guest, lambda program: Replay(program, guest.model))
    assert guest.not_recorded is None
    assert guest.recording is not None
    layer = next(module for module in model.modules() if module._forward_hooks)
    with hook(layer.register_forward_hook, lambda module, args, out: None):
        logits(guest)
    assert guest.recording.by_modules == {"hooks of modules": 1}, "a hook beside those of transformers is seen"
    logits(guest)
    assert guest.recording.steps == 1


def test_a_forward_that_replaces_one_of_ours_is_seen() -> None:
    mixer = nn.Linear(2, 2)
    network = nn.Sequential(mixer, nn.Linear(2, 2))
    wrap_mixers([mixer], lambda: None)
    hooks, ours = Hooks(network), mixer.forward
    assert not hooks.found()
    mixer.forward = lambda x: ours(x) / 2  # pyright: ignore[reportAttributeAccessIssue] - as users do
    assert hooks.found()
    assert "its module 0 has a forward of its own" in hooks.reason()
    mixer.forward = ours
    assert not hooks.found()
