"""Functions of tests in a process of their own, which has imported little and forks in milliseconds.

A fork copies the page tables of its parent. Those of a process that tests networks are gigabytes wide: a test that
forks hundreds of times spent most of its time there.
"""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def in_small_process(function: Callable[..., None], *arguments: Any) -> None:
    """Call a function of a module of tests, with arguments that JSON has. Raises with its traceback if it raises."""
    search = [str(ROOT / "src"), str(ROOT), *filter(None, sys.path)]
    command = [sys.executable, "-m", __name__, function.__module__, function.__name__, json.dumps(arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(search)}
    ended = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    if ended.returncode:
        raise AssertionError(f"in a process of its own, exit code {ended.returncode}:\n{ended.stderr}")


if __name__ == "__main__":
    module, name, arguments = sys.argv[1:]
    getattr(importlib.import_module(module), name)(*json.loads(arguments))
