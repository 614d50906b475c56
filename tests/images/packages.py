"""Packages that some types of models need, in a folder of their own: of processes that are given it.

PyPI's torchvision for Linux is for CUDA, and beside a torch for CPUs its import fails, and with it all of transformers.
So it is not in the environment; `beside/sitecustomize.py` lets it be imported.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

PACKAGES = Path(sys.prefix) / "vision"  # where `make` installs them


def environment() -> Mapping[str, str]:
    """Of a process that has them."""
    root = Path(__file__).parents[2]
    paths = [root / "tests" / "images" / "beside", PACKAGES, root / "src", root]
    return os.environ | {"PYTHONPATH": os.pathsep.join(map(str, paths))}
