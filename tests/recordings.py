"""What the engines of tests share, so that each of them costs little.

What the steps of a network take is measured once for all networks with the same config in a process of tests, unless a
test is marked `measures`. Engines that record, as those of users do, share more:

A program is captured once, for all processes and runs of tests: it is kept in the cache directory of the user, as
always. In one process of tests moreover
  * a recording is compared with its modules once for all networks with one program: these differ in their weights;
  * operators of the compiled loop are compared with torch's once.
"""

import copy
import os
from collections.abc import Mapping

import pytest

from kvcellar.engine import build, open_drafts, recorded
from kvcellar.engine.measures import Measures, digest, flags, model, shape
from kvcellar.kernels.recorded_kernel import StepKernel
from kvcellar.models.guest import Guest
from kvcellar.models.recording import record
from kvcellar.models.recording.recording import Recording
from kvcellar.models.recording.saved import NoDigest, digest_of


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

    def start(self, *, measures: bool, recordings: bool) -> None:
        """Share these from now on."""
        self.stop()
        self._patch = pytest.MonkeyPatch()
        if measures:
            self._patch.setattr(build, "measures_of", self._measures_of)
            self._patch.setattr(open_drafts, "measures_of", self._measures_of)
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
