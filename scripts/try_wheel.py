"""Install the wheel in `dist/` for this machine into an empty environment, and run it as a new user does, on a machine
without a compiler: prints the seconds of each step, and fails where one does.

    python scripts/try_wheel.py [DIRECTORY]        # of the environment; a temporary one, if none is named
"""

import platform
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
    began = time.monotonic()
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{what} failed: {' '.join(command)}\n{run.stdout}{run.stderr}")
    print(f"{time.monotonic() - began:7.1f} s  {what}", flush=True)
    return run.stdout


def main(where: Path) -> None:
    wheels = sorted((ROOT / "dist").glob(f"*_{platform.machine()}.whl"))
    if len(wheels) != 1:
        sys.exit(f"dist/ has {len(wheels)} wheels for {platform.machine()}; `make wheel` makes one")
    venv.create(where / "env", with_pip=True)
    programs, home = where / "env/bin", where / "home"
    home.mkdir()
    bare = {"PATH": str(programs), "HOME": str(home), "OMP_NUM_THREADS": "2"}
    pip = (str(programs / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check", "install")
    constraints = ("-c", str(ROOT / "constraints.txt"))
    torch = next(one for one in (ROOT / "constraints.txt").read_text().splitlines() if one.startswith("torch=="))
    _timed("pip install torch", *pip, *constraints, torch, **bare)
    _timed(f"pip install {wheels[0].name}", *pip, *constraints, str(wheels[0]), **bare)
    kvcellar = str(programs / "kvcellar")
    for start in ("first", "second"):
        printed = _timed(
            f"kvcellar run, {start} start", kvcellar, "run", "embedded", PROMPT, "--max-tokens", "24", **bare
        )
        assert printed.strip(), "it has written nothing"
    _timed("kvcellar --help", kvcellar, "--help", **bare)
    _timed(
        "import kvcellar, without torch or a server",
        str(programs / "python"),
        "-c",
        f"import kvcellar; {WEIGHED}",
        **bare,
    )
    compiled = [*home.rglob("*.so")]
    assert not compiled, f"something was compiled: {compiled}"


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]).resolve())
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(Path(folder))
