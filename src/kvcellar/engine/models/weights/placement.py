"""placement: which devices a network may be on: the CPU or one CUDA device, whole. Others are refused by name.

Torch is not imported: settings are checked before it is.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvcellar.errors import ModelRefused

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SERVED = ("cpu", "cuda")
ELSEWHERE: Mapping[str, str] = {
    "mps": "Apple's GPUs",
    "xpu": "Intel's GPUs",
    "npu": "Huawei's NPUs",
    "hpu": "Intel's Gaudi",
    "mlu": "Cambricon's MLUs",
    "musa": "Moore Threads' GPUs",
    "xla": "TPUs",
    "tpu": "TPUs",
    "vulkan": "Vulkan",
}  # torch's names of devices that no attention backend of ours runs on
PARALLEL = (  # settings of other engines that spread a network over devices
    *("tp_plan", "tp_size", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"),
    *("tensor_split", "split_mode", "device_map", "distributed_config"),
)
ONE_DEVICE = "a network is on one device, whole: there is no tensor or pipeline parallelism"


def why_not_on(device: str) -> str | None:
    """Why no network is served on a device; None: one may be, or torch has no device of that name."""
    what = ELSEWHERE.get(device.partition(":")[0])
    return None if what is None else f"{what} are not supported; use cpu or cuda"


def check_placement(network: "PreTrainedModel") -> None:
    """Raise `ModelRefused` for a network that was given in parts, on several devices, or on one that is not served."""
    name = type(network).__name__
    if (network.tp_size or 1) > 1:
        raise ModelRefused(f"{name} has only its part of {network.tp_size} by tensor parallelism, and {ONE_DEVICE}")
    places = sorted({str(parameter.device) for parameter in network.parameters()})
    if len(places) > 1:
        raise ModelRefused(f"{name} is on {', '.join(places)}, and {ONE_DEVICE}. Load it without device_map")
    if places and places[0].partition(":")[0] not in SERVED:
        raise ModelRefused(f"{name} is on {places[0]}: {why_not_on(places[0]) or 'load it on cpu or cuda'}")
