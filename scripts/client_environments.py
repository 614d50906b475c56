"""Make the environments of the clients that tests/clients drives: `python -m scripts.client_environments FOLDER`.

Each client has one of its own, because their versions of common packages differ from each other's and from ours. The
tests find the folder by KVCELLAR_CLIENTS, and skip a client that is not in it.
"""

import subprocess
import sys
import venv
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

# Versions that the tests were written with.
CLIENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # torch by name: a find-links or an index of CPU builds then has the one to take, without gigabytes of CUDA.
        "guidellm": ("torch==2.13.0", "guidellm==0.8.1"),
        "instructor": ("instructor==1.17.0",),
        "langchain-openai": ("langchain-openai==1.7.3",),
        "litellm": ("litellm==1.106.2",),
        "lm-eval": ("lm-eval[api]==0.4.13",),
        "openai-agents": ("openai-agents==0.24.0",),
    }
)


def make(folder: Path, name: str) -> bool:
    """An environment with one client, unless there is one. Returns whether its packages could be installed."""
    python = folder / name / "bin" / "python"
    if not python.exists():
        venv.create(folder / name, with_pip=True)
    return subprocess.run([python, "-m", "pip", "install", "--quiet", *CLIENTS[name]], check=False).returncode == 0


def main(folder: Path, names: list[str]) -> int:
    """Make the environments of these clients, or of all."""
    if unknown := sorted(set(names) - set(CLIENTS)):
        print(f"no such clients: {', '.join(unknown)}; there are {', '.join(CLIENTS)}", file=sys.stderr)
        return 2
    missing = [name for name in names or CLIENTS if not make(folder, name)]
    for name in missing:
        print(f"{name} could not be installed", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    if len(sys.argv) < 2:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), sys.argv[2:]))
