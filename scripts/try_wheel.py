"""Install the wheel in `dist/` for this machine into an empty environment, and run it as a new user does, with and
without a compiler: prints the seconds of each step, also of CPU, and fails where one does, or where something that the
wheel has is compiled.

    python scripts/try_wheel.py [DIRECTORY]        # of the environment; a temporary one, if none is named
"""

import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
PROMPT = "def read_lines(path):"
WEIGHED = "import sys; assert not {'starlette', 'uvicorn', 'torch'} & set(sys.modules)"


def _timed(what: str, *command: str, **environment: str) -> str:
    began, before = time.monotonic(), _cpu_seconds()
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{what} failed: {' '.join(command)}\n{run.stdout}{run.stderr}")
    print(f"{time.monotonic() - began:7.1f} s, {_cpu_seconds() - before:5.1f} of CPU  {what}", flush=True)
    return run.stdout


def _cpu_seconds() -> float:
    """Of processes that have ended: other load on the machine changes them less."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _installed(where: Path) -> Path:
    """The programs of an environment with the wheel, in which pip has got torch first, as from its cache."""
    wheels = sorted((ROOT / "dist").glob(f"*_{platform.machine()}.whl"))
    if len(wheels) != 1:
        sys.exit(f"dist/ has {len(wheels)} wheels for {platform.machine()}; `make wheel` makes one")
    venv.create(where / "env", with_pip=True)
    programs = where / "env/bin"
    pip = (str(programs / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    constraints = ("-c", str(ROOT / "constraints.txt"))
    torch = next(one for one in (ROOT / "constraints.txt").read_text().splitlines() if one.startswith("torch=="))
    bare = {"PATH": str(programs), "HOME": str(where)}
    _timed("pip install torch", *pip, *constraints, torch, **bare)
    _timed(f"pip install {wheels[0].name}", *pip, *constraints, str(wheels[0]), **bare)
    return programs


def _start_twice(programs: Path, home: Path, what: str, **environment: str) -> list[Path]:
    """What was compiled."""
    home.mkdir()
    command = (str(programs / "kvcellar"), "run", "embedded", PROMPT, "--max-tokens", "24")
    for start in ("first", "second"):
        run = {"HOME": str(home), "OMP_NUM_THREADS": "2", **environment}
        assert _timed(f"{start} start and 24 tokens, {what}", *command, **run).strip(), "it has written nothing"
    return [*home.rglob("*.so")]


def main(where: Path) -> None:
    programs = _installed(where)
    bare, full = str(programs), f"{programs}{os.pathsep}{os.defpath}"
    compiled = _start_twice(programs, where / "without", "without a compiler", PATH=bare)
    if shutil.which("c++", path=os.defpath) is not None:
        compiled += _start_twice(programs, where / "with", "with a compiler", PATH=full)
        assert _start_twice(programs, where / "own", "kernels compiled as in a checkout", PATH=full, CXX="c++")
    assert not compiled, f"something was compiled: {compiled}"
    _timed("kvcellar --help", str(programs / "kvcellar"), "--help", PATH=bare)
    light = f"import kvcellar; {WEIGHED}"
    _timed("import kvcellar, without torch or a server", str(programs / "python"), "-c", light, PATH=bare)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
