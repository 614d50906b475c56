"""A recorded forward in fixed memory gives the logits of the network's own modules, bit for bit."""

import logging
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.input_limits import random_tokens
from kvcellar.engine.models.load import load
from kvcellar.engine.models.weights.packing import pack_model
from kvcellar.engine.recording import replay
from kvcellar.engine.recording.capture import capture
from kvcellar.engine.recording.native import TOGETHER, NativeExecutor, native
from kvcellar.engine.recording.program import CONVOLVE, Sizes
from kvcellar.engine.recording.record import record
from kvcellar.engine.recording.recorded import Binder, Binding
from kvcellar.engine.recording.recorded_kernel import StepKernel
from kvcellar.engine.recording.recording import Captured, RecordedStep, Recording, Results
from kvcellar.engine.recording.replay import Replay
from kvcellar.kernels.codes import Codes
from kvcellar.kernels.compiled import COMPILERS
from kvcellar.kernels.packed import pack
from kvcellar.kernels.quantised import QuantisedKernel, QuantisedLinear
from kvcellar.kernels.scans import ScanKernel
from kvcellar.memory.attention.choose import backends
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.models.quantised import saved
from tests.models.served import FLAT
from tests.models.test_recording import Steps, timeline
from tests.zoo import ARCHS

pytestmark = pytest.mark.skipif(not any(map(shutil.which, COMPILERS)), reason="there is no compiler")


@pytest.fixture(scope="module")
def kernel() -> StepKernel:
    return StepKernel(os.environ)


@pytest.fixture(autouse=True)
def without_traces_of_torch(caplog: pytest.LogCaptureFixture) -> None:
    """Torch logs every symbolic size, and pytest would keep that."""
    caplog.set_level(logging.WARNING, "torch.__trace")


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)], ids=["bfloat16", "float32"]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if at % 2 else ()) for at, name in enumerate(FLAT)]
)
def test_a_forward_in_fixed_memory_equals_the_modules(name: str, dtype: torch.dtype, kernel: StepKernel) -> None:
    """So does the text that is decoded, and in float32 the forward operator by operator, on torch. By default some
    run in float32 (`test_matrix.py`, `test_recording.py`), in which the passes and the operators are the same."""
    model = ARCHS[name].build().to(dtype=dtype)
    if name.startswith("lfm"):  # programs call its linear layers with other numbers of rows than mixers do
        pack_model(model)
    guest = build_guest(model, backends())
    captured = capture(guest)
    theirs, text = timeline(guest), greedy(guest)
    guest.recording = recording = recorded(guest, captured, kernel)
    ours = timeline(guest)
    assert [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(theirs)
    assert recording.steps == len(ours)
    assert greedy(guest) == text
    assert recording.steps == len(ours) + len(text)
    if dtype is torch.float32:
        guest.recording = Recording(captured, Replay(captured.program, guest.model))
        assert all(torch.equal(a, b) for a, b in zip(timeline(guest), theirs, strict=True))


@pytest.mark.parametrize("packed", [True, False])
def test_prompts_have_the_code_of_convolutions_where_that_has_the_same_bits(packed: bool, kernel: StepKernel) -> None:
    """The sums of torch's linear layers depend on the number of rows, which is another one where mixers are called."""
    model = ARCHS["lfm2-moe"].build().to(dtype=torch.bfloat16)
    if packed:
        pack_model(model)
    guest = build_guest(model, backends())
    record(guest, native(guest.model, kernel))
    assert guest.recording is not None
    assert guest.recording.by_modules == {}
    names = {op.name for op in guest.recording.captured.program.ops}
    assert (CONVOLVE in names, "kvcellar.mix" in names) == (packed, not packed)


def greedy(guest: Guest) -> list[int]:
    """The text behind a prompt, decoded by itself."""
    memory = guest.memory({group.name: 40 for group in guest.shape.groups}, rows=4)
    text, new = list[int](), random_tokens(guest.model, 17, torch.Generator().manual_seed(11))
    for _ in range(8):
        at = memory.length(0)
        plan = memory.begin(Batch((Feed(0, Span(at, at + len(new))),)))
        logits = guest.forward(memory, plan, new, [len(new) - 1])
        memory.commit()
        new = [int(logits[0].argmax())]
        text += new
    return text


@pytest.mark.parametrize(
    ("name", "dtype"), [("mamba", torch.float32), ("mamba2", torch.bfloat16), ("falcon-h1", torch.bfloat16)]
)
def test_recurrent_layers_that_decode_equal_their_modules(name: str, dtype: torch.dtype, kernel: StepKernel) -> None:
    """One sequence, and as many as torch computes convolutions of in another way."""
    guest = build_guest(ARCHS[name].build().to(dtype=dtype), backends())
    pack(guest.model)
    captured = capture(guest)
    assert captured.decoding is not None, captured.opaque
    assert not any(op.name == "kvcellar.mix" for op in captured.decoding.ops)
    theirs = decoding(guest)
    guest.recording = recorded(guest, captured, kernel)
    guest.recording.executor = Refuses()
    assert [torch.equal(a, b) for a, b in zip(decoding(guest), theirs, strict=True)] == [True] * len(theirs)
    assert guest.recording.by_modules == {"a prompt": 2}


def test_the_kernel_of_scans_is_looked_up_once_for_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding it reads and digests its library, which takes longer than a step of a small model."""
    guest = build_guest(ARCHS["mamba"].build(), backends())
    captured, made = capture(guest), list[ScanKernel]()

    def looked_up(network: nn.Module) -> ScanKernel:
        made.append(ScanKernel(os.environ))
        return made[-1]

    monkeypatch.setattr(replay, "scan_kernel", looked_up)
    assert captured.decoding is not None
    programs = [Replay(one, guest.model) for one in (captured.program, captured.decoding)]
    guest.recording = Recording(captured, *programs)
    greedy(guest)
    assert guest.recording.steps == 8
    assert 1 <= len(made) <= len(programs)


@pytest.mark.parametrize("packed", [True, False])
def test_a_step_is_bound_for_few_numbers_of_rows_with_logits(
    packed: bool, kernel: StepKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their number changes with each prompt that ends. The logits are those of the modules: torch's own products have
    other bits beside other numbers of rows."""
    bound: list[Sizes] = []
    binding = Binder.bound

    def counted(self: Binder) -> Binding:
        bound.append(self._sizes)
        return binding(self)

    monkeypatch.setattr(Binder, "bound", counted)
    guest = build_guest(ARCHS["llama"].build().to(torch.bfloat16), backends())
    if packed:
        pack(guest.model)
    captured, numbers = capture(guest), (*range(1, 19), 20)

    def logits() -> list[Tensor]:
        steps = Steps(guest)
        for wanted in numbers:
            steps.step([(0, 13), (1, 7)], wanted=wanted)
            steps.memory.clear()
        return steps.logits

    theirs = logits()
    guest.recording = recorded(guest, captured, kernel)
    ours = logits()
    assert [torch.equal(a, b) for a, b in zip(ours, theirs, strict=True)] == [True] * len(numbers)
    few = [(20, 1), (20, TOGETHER), (20, 20)]
    assert [(sizes["T"], sizes["W"]) for sizes in bound] == (few if packed else [(20, one) for one in numbers])


class Refuses:
    """An executor that runs no step."""

    name = "refuses"

    def refuse(self, step: RecordedStep) -> str | None:
        return "a prompt"

    def run(self, step: RecordedStep) -> Results:
        raise AssertionError("it was refused")

    def clear(self) -> None:
        pass


def decoding(guest: Guest) -> list[Tensor]:
    steps = Steps(guest, rows=40)
    steps.step([(seq, 2 + seq % 2) for seq in range(18)])
    for some in (range(18), range(1), range(17, 1, -3)):
        steps.step([(seq, 1) for seq in some])
    steps.step([(0, 1), (1, 1)], stores=False)
    steps.step([(0, 1), (1, 1)], kept={0: 1, 1: 1})
    steps.step([(0, 1), (1, 2)])
    steps.step([(0, 1), (1, 1)])
    return steps.logits


def recorded(guest: Guest, captured: Captured, kernel: StepKernel) -> Recording:
    programs = [one and NativeExecutor(one, guest.model, kernel) for one in (captured.program, captured.decoding)]
    assert programs[0] is not None
    return Recording(captured, programs[0], programs[1])


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss", "qwen3-moe"])
def test_packed_layers_and_attention_are_called_natively(name: str, kernel: StepKernel) -> None:
    """Merged layers, too, and rows of an output layer that is the embedding."""
    guest = build_guest(ARCHS[name].build().to(dtype=torch.bfloat16), backends())
    pack(guest.model)
    captured = capture(guest)
    assert (name == "gemma3") == any(op.name == "kvcellar.embedding" for op in captured.program.ops)
    theirs = timeline(guest)
    executor = NativeExecutor(captured.program, guest.model, kernel)
    guest.recording = Recording(captured, executor)
    assert [torch.equal(a, b) for a, b in zip(timeline(guest), theirs, strict=True)] == [True] * len(theirs)


def test_an_id_that_no_row_of_a_packed_embedding_has_is_an_error(kernel: StepKernel) -> None:
    guest = build_guest(ARCHS["gemma3"].build(), backends())
    pack(guest.model)
    guest.recording = recorded(guest, capture(guest), kernel)
    memory = guest.memory({group.name: 16 for group in guest.shape.groups}, rows=2)
    for ids in ([3, guest.model.config.vocab_size], [-1, 3]):
        plan = memory.begin(Batch((Feed(0, Span(0, 2)),)))
        with pytest.raises(IndexError, match="is not one of the rows"):
            guest.forward(memory, plan, ids, [1])
        memory.abandon()
    assert guest.recording.steps == 2, "they ran recorded"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_quantised_layers_of_any_type_run_recorded(dtype: torch.dtype, kernel: StepKernel) -> None:
    """Those of float16 have no native call."""
    model, products = ARCHS["llama"].build().to(dtype=dtype), QuantisedKernel(os.environ)
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj"):
            weight = getattr(layer.mlp, name).weight.detach().float()
            scales = weight.abs().amax(1, keepdim=True) / 127
            codes = Codes((weight / scales).round().to(torch.int8), None, scales, None, None)
            setattr(layer.mlp, name, QuantisedLinear(products, codes, None, dtype))
    guest = build_guest(model, backends())
    captured = capture(guest)
    theirs = timeline(guest)
    guest.recording = Recording(captured, NativeExecutor(captured.program, guest.model, kernel))
    ours = timeline(guest)
    assert guest.recording.steps == len(ours) == len(theirs)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3-moe"])
def test_a_network_in_float16_runs_recorded(name: str, kernel: StepKernel) -> None:
    """Its operators are torch's."""
    guest = build_guest(ARCHS[name].build().to(dtype=torch.float16), backends())
    captured = capture(guest)
    theirs = timeline(guest)
    guest.recording = recorded(guest, captured, kernel)
    assert all(torch.equal(a, b) for a, b in zip(timeline(guest), theirs, strict=True))


def test_experts_with_codes_run_recorded(kernel: StepKernel, tmp_path: Path) -> None:
    model = load(saved(tmp_path / "m", "qwen3-moe"), weights="int4").model
    guest = build_guest(model, backends())
    captured = capture(guest)
    assert {op.name for op in captured.program.ops} >= {"kvcellar.experts", "kvcellar.linear"}
    theirs = timeline(guest)
    guest.recording = Recording(captured, NativeExecutor(captured.program, guest.model, kernel))
    assert all(torch.equal(a, b) for a, b in zip(timeline(guest), theirs, strict=True))
    assert guest.recording.steps == len(theirs)
