"""For processes that have torchvision, which this folder and that of torchvision are put before (`PYTHONPATH`).

PyPI's torchvision for Linux is for CUDA. Beside a torch for CPUs its operators cannot be loaded, and its import fails
at two of them, and with it all of transformers. Declared here, they raise where they are called: no image processor
does so.
"""

import torch

try:
    import torchvision  # noqa: F401 # pyright: ignore
except RuntimeError:
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
