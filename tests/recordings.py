"""What tests share of recordings, so that engines which record, as those of users do, cost them little.

A program is captured once, for all processes and runs of tests: it is kept in the cache directory of the user, as
always. In one process of tests moreover
  * a recording is compared with its modules once for all networks with one program: these differ in their weights;
  * operators of the compiled loop are compared with torch's once.
"""

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from kvcellar.kernels.recorded_kernel import StepKernel
    from kvcellar.models.guest import Guest
    from kvcellar.models.recording.recording import Recording

PLACES = ("CXX", "HOME", "XDG_CACHE_HOME")  # variables that say which compiled loop is loaded


def share(config: pytest.Config) -> None:
    """Until the end of the run."""
    from kvcellar.engine import recorded
    from kvcellar.kernels.recorded_kernel import StepKernel
    from kvcellar.models.recording import record
    from kvcellar.models.recording.saved import NoDigest, digest_of

    kernels: dict[tuple[str, ...], StepKernel] = {}
    right: set[tuple[object, ...]] = set()
    compare = record.compare

    def shared(environment: Mapping[str, str]) -> "StepKernel":
        place = tuple(environment.get(name, "") for name in PLACES)
        if place not in kernels:
            kernels[place] = StepKernel(environment)
        return copy.copy(kernels[place])  # which has its own clock

    def compare_once(guest: "Guest", recording: "Recording") -> None:
        found, backends = recording.captured, sorted(type(one).__name__ for one in guest.backends.values())
        try:
            program = digest_of(guest), recording.executor.name, found.decoding is None, *found.opaque, *backends
        except NoDigest:
            compare(guest, recording)
            return
        if program not in right:
            compare(guest, recording)
            right.add(program)

    patched = pytest.MonkeyPatch()
    patched.setattr(recorded, "StepKernel", shared)
    patched.setattr(record, "compare", compare_once)
    config.add_cleanup(patched.undo)
