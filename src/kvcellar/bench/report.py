"""report: versions, machine and settings of a run."""

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from kvcellar import __version__


def about(*, threads: int, quick: bool) -> dict[str, Any]:
    """Versions, machine and settings of a run."""
    return {
        "kvcellar": __version__,
        "torch": torch.__version__,
        "transformers": version("transformers"),
        "cpu": _cpu(),
        "threads": threads,
        "dtype": "bfloat16",
        "quick": quick,
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    rows = info.read_text().splitlines() if info.is_file() else []
    names = [row.partition(":")[2].strip() for row in rows if row.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
