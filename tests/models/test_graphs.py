"""Steps that are replayed: which ones, with what result, and where not. Graphs of calls stand for CUDA graphs."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from kvcellar.engine.load.recorded import replay_graphs
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.recording import graphs as graphs_of
from kvcellar.engine.recording.graphs import CudaGraphs, Graphs
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.attention.triton import Triton
from tests.attention.by_tables import attend
from tests.models import graph_of_calls
from tests.models.test_recording import Steps
from tests.zoo import ARCHS


def guest_of(name: str) -> Guest:
    return build_guest(ARCHS[name].build(), (Triton(attend, "cpu"), *backends()))


def replayed(guest: Guest) -> Graphs:
    replay_graphs(guest, graph_of_calls.record)
    assert guest.recording is not None, guest.not_recorded
    assert isinstance(guest.recording.executor, Graphs)
    return guest.recording.executor


def decoding(steps: Steps) -> list[Tensor]:
    """Sequences that come, go and grow, with steps of other kinds in between."""
    steps.step([(0, 13), (1, 3)])
    for _ in range(4):
        steps.step([(0, 1), (1, 1)])
    steps.step([(2, 5)])
    for _ in range(4):
        steps.step([(1, 1), (0, 1), (2, 1)], wanted=2)
    steps.step([(0, 1), (1, 1)], stores=False)
    for _ in range(3):
        steps.step([(0, 1), (1, 1)])
        steps.step([(2, 1)], wanted=0)
    return steps.logits


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_replayed_steps_have_the_logits_of_the_modules(name: str) -> None:
    guest = guest_of(name)
    graphs = replayed(guest)
    ours, theirs = decoding(Steps(guest)), decoding(Steps(guest_of(name)))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert guest.recording is not None
    assert graphs.never is None
    assert guest.recording.by_modules == {"prompts": 2, "query-only rows": 1}
    assert 3 <= graphs.captured <= 4 < guest.recording.steps


def test_planes_at_addresses_of_others_are_captured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device reuses memory: what was freed may have held planes of another memory."""
    guest = guest_of("llama")
    graphs = replayed(guest)
    ours, theirs = ([Steps(one), Steps(one)] for one in (guest, guest_of("llama")))
    with monkeypatch.context() as patched:
        patched.setattr(Tensor, "data_ptr", lambda self: 0)
        for steps in (*ours, *theirs):
            steps.step([(0, 9)])
            for _ in range(3):
                steps.step([(0, 1)])
    for one, other in zip(ours, theirs, strict=True):
        for a, b in zip(one.logits, other.logits, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert graphs.captured == 2
    assert graphs.seconds > 0


class Nothing:
    """A graph without launches."""

    def replay(self) -> None:
        """Leave results as they are."""


@pytest.mark.parametrize("wanted", [None, 0])
def test_a_graph_with_other_logits_is_not_used(wanted: int | None) -> None:
    """Also where it was captured on a step without logits."""
    guest = guest_of("llama")
    replay_graphs(guest, lambda run: Nothing())
    one, other = Steps(guest), Steps(guest_of("llama"))
    for steps in (one, other):
        steps.step([(0, 9)])
        for _ in range(3):
            steps.step([(0, 1)], wanted=wanted)
        steps.step([(0, 1)])
    for a, b in zip(one.logits, other.logits, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    assert guest.recording is not None
    assert guest.recording.by_modules["a captured step had other logits than its operators"] == 2


def test_shapes_that_are_used_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not those that were captured last."""
    monkeypatch.setattr(graphs_of, "MOST", 2)
    guest = guest_of("llama")
    graphs, steps = replayed(guest), Steps(guest)
    steps.step([(0, 9), (1, 9)])
    for _ in range(2):
        steps.step([(0, 1)])
    for other in ([(1, 2)], [(1, 4)], [(0, 1), (1, 1)]):
        steps.step(other)
        steps.step([(0, 1)])
    assert graphs.captured == 1


def test_each_device_has_a_stream_of_its_own_for_captures() -> None:
    with mock.patch.object(torch, "cuda", mock.MagicMock()) as cuda:
        cuda.Stream.side_effect = ["one", "other"]
        for made in [CudaGraphs(torch.device("cuda", index)) for index in (0, 1)]:
            made(lambda: None)
    assert [call.kwargs["stream"] for call in cuda.graph.call_args_list] == ["one", "other"]
    assert [call.args[0].index for call in cuda.device.call_args_list] == [0, 1, 0, 1]
    cuda.stream.assert_called_with(cuda.current_stream.return_value)  # it is current again, whatever a capture leaves


class Waits(nn.Module):
    """A result of the device decides what is computed next."""

    def __init__(self, whole: nn.Module) -> None:
        super().__init__()
        self.whole = whole

    def forward(self, x: Tensor) -> Tensor:
        out = self.whole(x)
        return out if float(out.sum()) < 1e9 else -out


def test_what_cannot_be_captured_is_run_as_before_with_the_reason() -> None:
    model = ARCHS["llama"].build()
    for layer in model.model.layers:
        layer.mlp = Waits(layer.mlp)
    guest = build_guest(model, (Triton(attend, "cpu"), *backends()))
    graphs = replayed(guest)
    for a, b in zip(decoding(Steps(guest)), decoding(Steps(guest_of("llama"))), strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)
    why = "RuntimeError: aten::item waits for the device while a graph is captured"
    assert graphs.never == f"a step could not be captured: {why}"
    assert guest.recording.by_modules[graphs.never] > 5


class Ended:
    """As torch's capture: ending it fails, too, where it has failed."""

    def __enter__(self) -> None:
        """Nothing."""

    def __exit__(self, *error: object) -> None:
        if error[0] is not None:
            raise RuntimeError("the capture was invalidated")


def test_the_reason_is_the_first_error_of_a_capture() -> None:
    def fails(run: Callable[[], None]) -> Nothing:
        with Ended():
            raise RuntimeError("this cannot be captured")

    guest = guest_of("llama")
    replay_graphs(guest, fails)
    steps = Steps(guest)
    for _ in range(3):
        steps.step([(0, 1)])
    assert guest.recording is not None
    assert "a step could not be captured: RuntimeError: this cannot be captured" in guest.recording.by_modules


def test_steps_with_adapters_are_not_replayed() -> None:
    guest = guest_of("llama")
    graphs = replayed(guest)
    step = mock.Mock(ids=[1], plan=mock.Mock(feeds=[mock.Mock(pos=[0])], stored=1, tokens=1))
    assert graphs.refuse(step) == "adapters"
    step.door.adapted = None
    step.door.history.return_value.backend.name = "another"
    assert graphs.refuse(step) == "attention by another"


@pytest.mark.parametrize(
    ("name", "dtype", "why"),
    [
        ("lfm2", torch.float32, "layers with a recurrent state are not captured"),
        # In float64 latents are expanded, as they are on devices.
        ("minicpm3", torch.float64, "keys that are computed from stored planes (MLA) have no fixed number"),
    ],
)
def test_programs_that_are_never_captured(name: str, dtype: torch.dtype, why: str) -> None:
    guest = build_guest(ARCHS[name].build().to(dtype), (Triton(attend, "cpu"), *backends()))
    replay_graphs(guest, graph_of_calls.record)
    assert (guest.recording, guest.not_recorded) == (None, why)


def test_attention_whose_launches_differ_from_step_to_step_is_not_replayed() -> None:
    guest = build_guest(ARCHS["llama"].build(), (Sdpa(), *backends()))
    replayed(guest)
    steps = Steps(guest)
    for _ in range(3):
        steps.step([(0, 1)])
    assert guest.recording is not None
    assert guest.recording.by_modules == {"attention by sdpa": 3}
