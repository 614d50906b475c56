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
import os
from collections.abc import Callable, Mapping

import pytest
from torch import Tensor, nn
from transformers import PreTrainedModel

from kvcellar.engine.load import build, open_drafts, recorded, reserve
from kvcellar.engine.load.step_bytes import Measures, digest, flags, model, shape
from kvcellar.engine.models import build_guest
from kvcellar.engine.models.guest import Guest, Verdict
from kvcellar.engine.models.seam import our_attention
from kvcellar.engine.models.selftest import Reference
from kvcellar.engine.recording import record
from kvcellar.engine.recording.recorded_kernel import StepKernel
from kvcellar.engine.recording.recording import Recording
from kvcellar.engine.recording.saved import NoDigest, digest_of

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
        self._passed: dict[tuple[object, ...], Verdict] = {}

    def start(self, *, measures: bool, passed: bool, recordings: bool) -> None:
        """Share these from now on. `passed`: self-tests."""
        self.stop()
        self._patch = pytest.MonkeyPatch()
        if measures:
            self._patch.setattr(build, "measures_of", self._measures_of)
            self._patch.setattr(open_drafts, "measures_of", self._measures_of)
            self._patch.setattr(reserve, "_points", _coarse(reserve._points))
            self._patch.setattr(reserve._Steps, "read", _of_one(reserve._Steps.read))
        if passed:
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
        facts = {"model": model(guest), "shape": shape(guest), "flags": flags()}
        inputs = digest(facts | {"recorded": guest.recording is not None})
        return self._measures.setdefault(inputs, Measures(None, inputs))

    def _passed_once(self, test: Callable[[Guest, Reference], Verdict]) -> Callable[[Guest, Reference], Verdict]:
        def once(guest: Guest, reference: Reference) -> Verdict:
            latents = [binding.latent is None for binding in guest.shape.bindings.values()]
            backends = [type(one).__qualname__ for one in guest.backends.values()]
            key = test.__name__, _identity(guest.model, reference), guest.mode, guest._offsets, *latents, *backends
            if (verdict := self._passed.get(key)) is None:
                verdict = test(guest, reference)
                if verdict.passed:
                    self._passed[key] = verdict
            elif guest.mode == "flat":
                our_attention(guest.model)  # as the test leaves it
            return verdict

        return once

    def _kernel(self, environment: Mapping[str, str]) -> StepKernel:
        made = StepKernel(environment)
        self._file = os.path.realpath(made._library._name)
        return copy.copy(self._kernels.setdefault(self._file, made))  # a copy counts its own seconds

    def _compare_once(self, guest: Guest, recording: Recording) -> None:
        found, backends = recording.captured, sorted(type(one).__name__ for one in guest.backends.values())
        try:
            how = self._file, recording.executor.name, found.decoding is None
            program = digest_of(guest), *how, *found.opaque, *backends
        except NoDigest:
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


def _identity(network: PreTrainedModel, reference: Reference) -> object:
    """Of a network, by its parts, its config and what its own forward gives."""
    modules = [(name, type(one), _forward(one)) for name, one in network.named_modules()]
    logits = [(tuple(reference.texts[seq]), _bytes(rows)) for seq, rows in reference.logits.items()]
    return repr(sorted(network.config.to_dict().items())), network.dtype, tuple(modules), tuple(logits)


def _forward(module: nn.Module) -> str | None:
    """What stands in for the forward of a module."""
    own = vars(module).get("forward")
    return getattr(own, "__qualname__", type(own).__qualname__) if own is not None else None


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()
