"""Timelines and self-test detect errors: each mutation of attention gives wrong logits on a timeline."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kvcellar.engine.models import seam
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.seam import FlatDoor
from kvcellar.errors import ModelRefused
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.cells.layouts import Causal
from tests.models.timeline import BOUND, Timeline, seed_of
from tests.zoo import ARCHS

FAR = 10 * BOUND


def worst_difference(guest: Guest, name: str) -> float:
    timeline = Timeline(guest, ARCHS[name].build(), seed_of(name))
    timeline.play()
    try:
        return timeline.worst_difference()
    except AssertionError:  # greedy text differs
        return float("inf")


def without_windows(guest: Guest) -> None:
    groups = tuple(replace(group, layout=Causal()) for group in guest.shape.groups)
    guest.shape = replace(guest.shape, groups=groups)


def without_offsets(guest: Guest) -> None:
    guest._offsets = False


@pytest.mark.parametrize(
    ("name", "mutate"),
    [
        ("mistral", without_windows),
        ("gemma3", without_windows),
        ("llama4", without_windows),
        ("llama4", without_offsets),
    ],
)
def test_timelines_detect_a_wrong_shape(name: str, mutate: Callable[[Guest], None]) -> None:
    guest = build_guest(ARCHS[name].build(), backends())
    mutate(guest)
    assert worst_difference(guest, name) > FAR


def rows_as_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    original = Guest.forward

    def forward(self: Guest, memory: Any, plan: Any, ids: Tensor, want: Tensor, images: None = None) -> Tensor:
        return original(self, memory, _Counted(plan), ids, want)

    monkeypatch.setattr(Guest, "forward", forward)


class _Counted:
    """A plan whose positions are row numbers."""

    def __init__(self, plan: Any) -> None:
        self.plan, self.positions = plan, list(range(plan.tokens))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plan, name)


def changed_scoring(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def mutate(monkeypatch: pytest.MonkeyPatch) -> None:
        original = seam.scoring_of
        monkeypatch.setattr(seam, "scoring_of", lambda q, extras: replace(original(q, extras), **changes))

    return mutate


def stored_in_other_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each token's K/V are stored for the next row, which may be of another sequence."""
    original = FlatDoor.update
    monkeypatch.setattr(FlatDoor, "update", lambda self, k, v, layer: original(self, k.roll(1, 2), v.roll(1, 2), layer))


def stored_as_of_another_layer(monkeypatch: pytest.MonkeyPatch) -> None:
    original = FlatDoor.attend

    def attend(self: FlatDoor, module: Any, *rest: Any) -> Tensor:
        rightly = self._bindings
        self._bindings = {module: replace(rightly[module], layer=rightly[module].layer ^ 1)}
        try:
            return original(self, module, *rest)
        finally:
            self._bindings = rightly

    monkeypatch.setattr(FlatDoor, "attend", attend)


MUTATIONS = [
    ("llama", rows_as_positions),
    ("gpt2", rows_as_positions),
    ("gemma2", changed_scoring(softcap=None)),
    ("gpt-oss", changed_scoring(sinks=None)),
    ("granite", changed_scoring(scale=0.25)),
    ("llama", stored_in_other_rows),
    ("deepseek-v3", stored_in_other_rows),
    ("llama", stored_as_of_another_layer),
]


@pytest.mark.parametrize(("name", "mutate"), MUTATIONS)
def test_timelines_detect_wrong_attention(
    name: str, mutate: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    guest = build_guest(ARCHS[name].build(), backends())
    guest._scorings.clear()  # worked out by the self-test
    mutate(monkeypatch)
    assert worst_difference(guest, name) > FAR


@pytest.mark.parametrize(
    ("name", "mutate", "dtype"),
    [(*mutation, torch.float32) for mutation in MUTATIONS]
    + [(*mutation, torch.bfloat16) for mutation in MUTATIONS[::3]],
)
def test_the_self_test_prevents_flat(
    name: str,
    mutate: Callable[[pytest.MonkeyPatch], None],
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    try:
        guest = build_guest(ARCHS[name].build().to(dtype), backends())
    except ModelRefused as refusal:  # the mutation affects solo as well
        why = str(refusal)
    else:
        assert guest.mode == "solo"
        why = str(guest.refused)
    assert "its logits differ" in why
