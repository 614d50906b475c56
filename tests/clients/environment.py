"""Runs a program in the environment of a client, which `scripts/client_environments.py` has made."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.serve.fake_engine import PATIENCE

PROGRAMS = Path(__file__).parent / "programs"


def run(client: str, program: str, *arguments: str) -> Any:
    """What the program of this client prints last, as JSON."""
    return json.loads(printed(client, PROGRAMS / program, *arguments).splitlines()[-1])


def printed(client: str, program: Path, *arguments: str) -> str:
    """What a program prints. Skips the test where the client has no environment."""
    folder = os.environ.get("KVCELLAR_CLIENTS")
    python = Path(folder or "/nonexistent") / client / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{client} has no environment in KVCELLAR_CLIENTS; see scripts/client_environments.py")
    quiet = {
        "OPENAI_API_KEY": "any",
        "LANGSMITH_TRACING": "false",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    done = subprocess.run(
        [python, program, *arguments],
        env=kept | quiet,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout
