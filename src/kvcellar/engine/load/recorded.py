"""recorded: whether the steps of an engine run as a recording of the model's forward."""

import os
from collections.abc import Callable, Sequence

from kvcellar.engine.load.settings import Settings
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.recording.graphs import CudaGraphs, Graphs, RecordGraph
from kvcellar.engine.recording.native import native
from kvcellar.engine.recording.recorded_kernel import StepKernel
from kvcellar.engine.recording.replay import Replay
from kvcellar.engine.recording.saved import programs
from kvcellar.kernels.compiled import NotCompiled


def record_steps(guest: Guest, settings: Settings) -> None:
    """Record the forward of a guest, before it serves anything. `not_recorded` has the reason where it is not."""
    from kvcellar.engine.recording.record import record  # imports transformers

    if settings.record == "off":
        guest.not_recorded = "record is off"
    elif guest.device.type == "cuda":
        replay_graphs(guest, CudaGraphs(guest.device))
    elif guest.device.type != "cpu":
        guest.not_recorded = f"steps are recorded on CPUs and CUDA devices only, and the model is on {guest.device}"
    else:
        try:
            kernel = StepKernel(os.environ)
        except NotCompiled as error:
            guest.not_recorded = str(error)
        else:
            record(guest, native(guest.model, kernel), programs(os.environ))


def replay_graphs(guest: Guest, graphs: RecordGraph) -> None:
    """Let decoding steps of a guest be replayed from graphs."""
    from kvcellar.engine.recording.record import record

    record(guest, lambda program: Replay(program, guest.model), programs(os.environ))
    if guest.recording is not None:
        executor = Graphs(Replay(guest.recording.captured.program, guest.model), graphs)
        if executor.never is None:
            guest.recording.executor = executor
        else:
            guest.recording, guest.not_recorded = None, executor.never


def without_preparing(clock: Callable[[], float], guests: Sequence[Guest]) -> Callable[[], float]:
    """The clock without what preparing their recorded steps takes: each number of rows pays that once, which is not
    what a step of so many rows costs."""
    recordings = [guest.recording for guest in guests if guest.recording is not None]
    return lambda: clock() - sum(recording.executor.seconds for recording in recordings)
