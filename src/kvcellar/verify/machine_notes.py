"""machine_notes: what of this machine is not used, or was not tested, as notes of `doctor`."""

import platform
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from kvcellar.models.placement import ONE_DEVICE, why_not_on

TESTED = ("x86_64", "AMD64")
ARM = ("aarch64", "arm64")


@dataclass(frozen=True, slots=True)
class Machine:
    """What Python and torch report."""

    processor: str
    gpus: int  # CUDA devices
    mps: bool

    @classmethod
    def here(cls) -> "Machine":
        return cls(platform.machine(), torch.cuda.device_count(), torch.backends.mps.is_available())


def machine_notes(device: str, machine: Machine) -> Iterator[str]:
    """`device`: the one that a model is on."""
    if device == "cpu" and machine.processor not in TESTED:
        tested = "were tested in emulation only" if machine.processor in ARM else "were not tested on such a machine"
        yield f"processor {machine.processor}: kernels are compiled from their portable source, and {tested}"
    if machine.mps:
        yield f"mps is not used: {why_not_on('mps')}"
    if device != "cpu" and machine.gpus > 1:
        yield f"{device} is used of {machine.gpus} CUDA devices: {ONE_DEVICE}"
