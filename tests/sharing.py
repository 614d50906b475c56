"""What the engines of tests share, so that each of them costs little.

What the steps of a network take is measured once for all networks with the same config in a process of tests, and small
steps count as the next of a few sizes (`SIZES`), unless a test is marked `measures`. The self-test of a network, which
compares it with its own forward, is passed once for all networks with the same classes, config and logits of their own
forward, except in tests of `models`, which are about it. Engines that record, as those of users do, share more:

A program is captured once, for all processes and runs of tests: it is kept in the cache directory of the user, as
always. In one process of tests moreover
  * a recording is compared with its modules once for all networks with one program: these differ in their weights;
  * operators of the compiled loop are compared with torch's once.
"""

import copy
import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from kvcellar.engine.load import build, open_drafts, recorded, reserve
from kvcellar.engine.load.step_bytes import Measures
from kvcellar.engine.models import build_guest
from kvcellar.engine.models.guest import Guest, Verdict
from kvcellar.engine.models.registered import our_attention, own_attention
from kvcellar.engine.models.selftest import Reference
from kvcellar.engine.models.shape import Shape
from kvcellar.engine.recording import record
from kvcellar.engine.recording.facts import Unsettled, digest, flags, network, served
from kvcellar.engine.recording.recorded_kernel import StepKernel
from kvcellar.engine.recording.recording import Recording
from kvcellar.engine.recording.saved import digest_of

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # of steps that are not larger than those that are always measured

Points = tuple[tuple[int, ...], tuple[float, ...]]


class Sharing:
    """Between `start` and `stop` engines of this process share what was measured, and what was compared.

    Always true: no recording is taken as right whose compiled loop has not compared all its operators. Else a step that
    is measured would compare them, and its bytes would be counted as those of a step.
    """

    def __init__(self) -> None:
        self._patch: pytest.MonkeyPatch | None = None
        self._kernels: dict[str, StepKernel] = {}  # by the file of the compiled loop
        self._file = ""  # of the engine that is being opened
        self._right: set[tuple[object, ...]] = set()
        self._compare = record.compare
        self._measures: dict[str, Measures] = {}  # by the digest of a network
        self._network: object = None  # identity of the one that was tested last
        self._references: dict[object, Reference] = {}  # by network and seed
        self._passed: dict[tuple[object, ...], Verdict] = {}
        self._turns: dict[
            tuple[object, ...], list[dict[str, Any]]
        ] = {}  # what groups have, by network and how it is read

    def start(self, *, measures: bool, passed: bool, recordings: bool) -> None:
        """Share these from now on. `passed`: self-tests, and how keys turn."""
        self.stop()
        self._patch = pytest.MonkeyPatch()
        if measures:
            self._patch.setattr(build, "measures_of", self._measures_of)
            self._patch.setattr(open_drafts, "measures_of", self._measures_of)
            self._patch.setattr(reserve, "_points", _coarse(reserve._points))
            self._patch.setattr(reserve._Steps, "read", _of_one(reserve._Steps.read))
        if passed:
            self._patch.setattr(build_guest, "reference_of", self._reference_once(build_guest.reference_of))
            self._patch.setattr(build_guest, "with_rotations", self._turned_once(build_guest.with_rotations))
            for test in (build_guest.whole_step_test, build_guest.partial_commit_test):
                self._patch.setattr(build_guest, test.__name__, self._passed_once(test))
        if recordings:
            self._patch.setattr(recorded, "StepKernel", self._kernel)
            self._patch.setattr(record, "compare", self._compare_once)

    def stop(self) -> None:
        if self._patch is not None:
            self._patch.undo()
            self._patch = None

    def _measures_of(self, guest: Guest, *_: object, **how: object) -> Measures:
        inputs = digest({**network(guest), **served(guest), "flags": flags()})
        return self._measures.setdefault(inputs, Measures())

    def _passed_once(self, test: Callable[[Guest, Reference], Verdict]) -> Callable[[Guest, Reference], Verdict]:
        def once(guest: Guest, reference: Reference) -> Verdict:
            key = test.__name__, id(reference), *self._read(guest)
            if (verdict := self._passed.get(key)) is None:
                verdict = test(guest, reference)
                if verdict.passed:
                    self._passed[key] = verdict
            elif guest.mode == "flat":
                our_attention(guest.model)  # as the test leaves it
            return verdict

        return once

    def _reference_once(self, compute: Callable[[PreTrainedModel, int], Reference]) -> Callable[..., Reference]:
        def once(model: PreTrainedModel, seed: int) -> Reference:
            self._network = _identity(model)
            if (self._network, seed) in self._references:
                own_attention(model)  # as it is left
            else:
                self._references[self._network, seed] = compute(model, seed)
            return self._references[self._network, seed]

        return once

    def _turned_once(self, turned: Callable[[Guest], Shape]) -> Callable[[Guest], Shape]:
        def once(guest: Guest) -> Shape:
            key = self._read(guest)
            if key not in self._turns:
                groups = turned(guest).groups
                self._turns[key] = [{"no_shift": one.no_shift, "rotations": one.rotations} for one in groups]
            found = zip(guest.shape.groups, self._turns[key], strict=True)
            return replace(guest.shape, groups=tuple(replace(group, **turns) for group, turns in found))

        return once

    def _read(self, guest: Guest) -> tuple[object, ...]:
        latents = [binding.latent is None for binding in guest.shape.bindings.values()]
        backends = [type(one).__qualname__ for one in guest.backends.values()]
        return self._network, guest.mode, guest._offsets, *latents, *backends

    def _kernel(self, environment: Mapping[str, str]) -> StepKernel:
        made = StepKernel(environment)
        self._file = os.path.realpath(made._library._name)
        return copy.copy(self._kernels.setdefault(self._file, made))  # a copy counts its own seconds

    def _compare_once(self, guest: Guest, recording: Recording) -> None:
        found, backends = recording.captured, sorted(type(one).__name__ for one in guest.backends.values())
        try:
            how = self._file, recording.executor.name, found.decoding is None
            program = digest_of(guest), *how, *found.opaque, *backends
        except Unsettled:
            self._compare(guest, recording)
            return
        if program not in self._right:
            self._compare(guest, recording)
            self._right.add(program)


def _coarse(points: Callable[[int, tuple[int, int]], Points]) -> Callable[[int, tuple[int, int]], Points]:
    """The same, upwards: a larger step takes no less. So engines of all budgets measure the same steps."""

    def coarse(full: int, small: tuple[int, int]) -> Points:
        if full > small[1]:
            return points(full, small)
        return points(min(size for size in (*SIZES, small[1]) if size >= full), small)

    return coarse


def _of_one(read: Callable[[reserve._Steps, int, int], int]) -> Callable[[reserve._Steps, int, int], int]:
    """The same; a model that runs solo reads one prompt in a step, which is no longer than its context."""

    def read_one(steps: reserve._Steps, rows: int, remembered: int) -> int:
        return read(steps, rows if steps._guest.mode == "flat" else min(rows, steps._context), remembered)

    return read_one


def _identity(network: PreTrainedModel) -> object:
    """Of a network, by its parts, their code, its config and its parameters. One with hooks, or with functions of its
    own that know more than their code, is like no other."""
    modules: list[object] = []
    for name, module in network.named_modules():
        found = [(name, one) for name, one in vars(module).items() if callable(one) and not isinstance(one, type)]
        own = [(name, _code(one)) for name, one in found]
        if module._forward_hooks or module._forward_pre_hooks or any(code is None for _, code in own):
            return object()
        modules.append((name, type(module), type(module).forward, *own))
    weights = hashlib.sha256()
    for name, one in (*network.named_parameters(), *network.named_buffers()):
        weights.update(f"{name} {one.dtype} {list(one.shape)}".encode())
        weights.update(one.detach().flatten().view(torch.uint8).numpy().data)
    return repr(sorted(network.config.to_dict().items())), tuple(modules), weights.digest()


def _code(function: object) -> object:
    """All that a function computes by; None if that is not known."""
    if isinstance(function, partial):
        return function.func, repr((function.args, function.keywords))
    if isinstance(function, FunctionType):
        return function.__code__ if function.__closure__ is None else None
    return type(function) if type(function).__module__.startswith("kvcellar.") else None
