"""Build what is released, in `dist/`: an sdist, a wheel for each kind of processor whose compiler is here, with its
kernels compiled, and a list of what they need (an SBOM of CycloneDX). Prints sizes, and fails where a check does.

    python scripts/release.py [x86_64] [aarch64] [--twice]

`--twice` makes sdist and wheels again, from a copy of the commit in another directory, whose files have other times and
modes, and fails where a byte differs. It takes as long again.
"""

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from filecmp import cmp
from importlib.metadata import requires, version
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
DIST = ROOT / "dist"
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

from hatch_build import compiler_for  # noqa: E402
from kvcellar.kernels.built import LEVELS  # noqa: E402

MOST = 15_000_000  # bytes of a wheel


def _ran(*command: str, where: Path = ROOT, umask: int = -1, **environment: str) -> str:
    print("+", *command, flush=True)
    how = {"cwd": where, "umask": umask, "env": {**os.environ, **environment}}
    run = subprocess.run(command, **how, capture_output=True, text=True, check=False)
    if run.returncode:
        sys.exit(f"{run.stdout}{run.stderr}\n{command[0]} ended with {run.returncode}")
    return run.stdout


def _module(*command: str, **how: Any) -> str:
    return _ran(sys.executable, "-m", *command, **how)


def _machines(named: list[str]) -> list[str]:
    """Those that are named; else those for which there is a compiler."""
    if named:
        return named
    found = [platform.machine()] if platform.machine() in LEVELS else []
    for machine in LEVELS:
        try:
            compiler_for(machine)
        except SystemExit as missing:
            print(f"no wheel for {machine}: {missing}")
        else:
            found += [machine] if machine not in found else []
    return found


def _checked(wheel: Path) -> None:
    if (size := wheel.stat().st_size) > MOST:
        sys.exit(f"{wheel.name} has {size} bytes, more than {MOST}")
    tag = wheel.stem.rsplit("-", 1)[1]
    if f'"{tag}"' not in (shown := _module("auditwheel", "show", str(wheel)).replace("\n", " ")):
        sys.exit(f"{wheel.name} has another platform than its libraries need: {shown}")


def _needed() -> list[str]:
    """What the wheel needs without extras, directly and through others, at the versions that are installed here."""
    found, left = dict[str, str](), [Requirement("kvcellar")]
    while left:
        for text in requires(left.pop().name) or ():
            one = Requirement(text)
            name = canonicalize_name(one.name)
            if name not in found and (one.marker is None or one.marker.evaluate({"extra": ""})):
                found[name] = version(name)
                left.append(one)
    return sorted(f"{name}=={found[name]}" for name in found)


def _list_what_is_needed(name: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        pins = Path(folder, "pins.txt")
        pins.write_text("\n".join(_needed()))
        how = ("--pyproject", "pyproject.toml", "--output-reproducible", "-o", str(DIST / f"{name}.cdx.json"))
        _module("cyclonedx_py", "requirements", *how, str(pins))


def _make(machines: list[str], **how: Any) -> None:
    """An sdist and a wheel for each of `machines`, in `dist/`."""
    _module("build", "--no-isolation", "--sdist", **how)
    for machine in machines:
        _module("build", "--no-isolation", "--wheel", KVCELLAR_KERNELS=machine, **how)


def _make_again(machines: list[str], commit: str, made: list[Path], **how: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        archive, copy = f"{folder}/commit.tar", Path(folder, "copy")
        copy.mkdir()
        _ran("git", "archive", "--output", archive, commit)
        how |= {"where": copy, "umask": 0o077}
        _ran("tar", "--extract", "--touch", "--no-same-permissions", "--file", archive, **how)
        _make(machines, **how)
        for one in made:
            if not cmp(one, copy / "dist" / one.name, shallow=False):
                sys.exit(f"{one.name} has other bytes where it is made again, from a copy of the commit")
            print(f"the same bytes twice: {one.name}", flush=True)


def main(named: list[str], twice: bool) -> None:
    machines = _machines(named)
    if twice and (changed := _ran("git", "status", "--porcelain")):
        sys.exit(f"--twice needs a tree without changes; commit or stash these first:\n{changed}")
    commit, seconds = _ran("git", "log", "-1", "--format=%H %ct").split()
    epoch = {"SOURCE_DATE_EPOCH": seconds}
    shutil.rmtree(DIST, ignore_errors=True)
    _make(machines, **epoch)
    made = sorted(DIST.iterdir())
    _module("twine", "check", "--strict", *map(str, made))
    for wheel in DIST.glob("*.whl"):
        _checked(wheel)
    if twice:
        _make_again(machines, commit, made, **epoch)
    _list_what_is_needed(made[0].name.split("-py3")[0].removesuffix(".tar.gz"))
    for path in sorted(DIST.iterdir()):
        print(f"{path.stat().st_size:>10} {path.name}")


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("machines", nargs="*", metavar="MACHINE", help="default: those that a compiler is here for")
    arguments.add_argument("--twice", action="store_true")
    given = arguments.parse_args()
    main(given.machines, given.twice)
