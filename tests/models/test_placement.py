"""A network is on the CPU or on one CUDA device, whole. What asks for more is refused by name, and `doctor` says it."""

import pytest
import torch
from torch import nn

from kvcellar import Engine
from kvcellar.engine.load.settings import Settings
from kvcellar.engine.models.load import load
from kvcellar.engine.models.weights.placement import ELSEWHERE, PARALLEL
from kvcellar.errors import BadRequest, ModelRefused
from kvcellar.verify.diagnosis import Machine, diagnose, machine_notes
from tests.zoo import ARCHS


@pytest.mark.parametrize("device", [*ELSEWHERE, "mps:0"])
def test_a_device_that_is_not_served_is_named(device: str) -> None:
    what = ELSEWHERE[device.partition(":")[0]]
    with pytest.raises(BadRequest, match=f"device is '{device}': {what} are not supported; use cpu or cuda") as caught:
        Settings(device=device)
    assert caught.value.param == "device"


@pytest.mark.parametrize("name", PARALLEL)
def test_settings_that_spread_a_network_are_refused(name: str) -> None:
    with pytest.raises(BadRequest, match=f"^{name} is no engine setting: a network is on one device, whole") as caught:
        Engine(**{name: 2})
    assert caught.value.param == name


def test_a_network_in_parts_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    network = ARCHS["llama"].build()
    network._tp_size = 2
    with pytest.raises(ModelRefused, match="LlamaForCausalLM has only its part of 2 by tensor parallelism"):
        load(network)
    network._tp_size = None
    load(network)
    network.lm_head.weight = nn.Parameter(network.lm_head.weight.to("meta"))
    with pytest.raises(ModelRefused, match=r"LlamaForCausalLM is on cpu, meta, and a network is on one device, whole"):
        load(network)
    with pytest.raises(ModelRefused, match="LlamaForCausalLM is on meta: load it on cpu or cuda"):
        load(network.to(torch.device("meta")))  # pyright: ignore[reportCallIssue, reportArgumentType]


@pytest.mark.parametrize(
    ("device", "machine", "notes"),
    [
        ("cpu", Machine("x86_64", 0, mps=False), []),
        ("cpu", Machine("arm64", 0, mps=True), [
            "processor arm64: kernels are compiled from their portable source, and were tested in emulation only",
            "mps is not used: Apple's GPUs are not supported; use cpu or cuda",
        ]),
        ("cpu", Machine("riscv64", 0, mps=False), [
            "processor riscv64: kernels are compiled from their portable source, and were not tested on such a machine"
        ]),
        ("cuda:1", Machine("aarch64", 4, mps=False), [
            "cuda:1 is used of 4 CUDA devices: a network is on one device, whole: there is no tensor or pipeline "
            "parallelism"
        ]),
    ],
)  # fmt: skip
def test_doctor_says_what_of_a_machine_is_not_used(device: str, machine: Machine, notes: list[str]) -> None:
    assert list(machine_notes(device, machine)) == notes


def test_doctor_names_everything_that_a_compiler_would_make_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-compiler")
    monkeypatch.setattr(Machine, "here", classmethod(lambda cls: cls("arm64", 0, mps=False)))
    small = Settings(cache_bytes=10**6, threads=1, step_tokens=32, max_sequences=4, record="auto")
    found = diagnose(ARCHS["llama"].build(), small, kv_quality=False)
    why = "$CXX names no-compiler, which is not there"
    (group,) = found.groups
    assert why in (group.verdicts["cpu"] or "")
    assert (found.mode, group.backend) == ("flat", "sdpa")
    linears, steps, processor = (
        next(note for note in found.notes if words in note) for words in ("linear layers", "steps: ", "processor ")
    )
    assert f"packed for oneDNN ({why}" in linears
    assert steps == f"steps: by the model's modules ({why})"
    assert processor.startswith("processor arm64")
