"""hatch_build: compiles the kernels into a wheel for one kind of processor, where `$KVCELLAR_KERNELS` names that:
`x86_64` or `aarch64`. `make wheel` does; any other build makes a wheel for all platforms, which has their sources.

The compiler is GCC, `$CXX` or that of the distribution for this kind of processor. The same compiler makes the same
bytes: no library has paths, times or an id of its build.
"""

import os
import platform
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("src/kvcellar/kernels")
WITHOUT_TRACES = ("-s", "-Wl,--build-id=none")
GLIBC = "2_31"  # what the libraries need of the C library: `auditwheel show` prints it


def _built(root: Path) -> ModuleType:
    spec = spec_from_file_location("built", root / KERNELS / "built.py")
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules["built"] = module
    spec.loader.exec_module(module)
    return module


def compiler_for(machine: str) -> str:
    """Raises `SystemExit` where there is none."""
    name = os.environ.get("CXX") or ("g++" if machine == platform.machine() else f"{machine}-linux-gnu-g++")
    if shutil.which(name) is None:
        sys.exit(f"{name} is not installed: kernels for {machine} are compiled with it")
    return name


class KernelsHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        machine = os.environ.get("KVCELLAR_KERNELS", "")
        if not machine or version == "editable":
            return
        root = Path(self.root)
        built = _built(root)
        if machine not in built.LEVELS:
            sys.exit(f"KVCELLAR_KERNELS is {machine!r}; there are {', '.join(built.LEVELS)}")
        compiler, made = compiler_for(machine), Path(self.directory) / "kernels"
        shutil.rmtree(made, ignore_errors=True)
        jobs = [(level, source) for level in built.LEVELS[machine] for source in sorted((root / KERNELS).glob("*.cpp"))]

        def compile_one(job: tuple[Any, Path]) -> Path:
            level, source = job
            folder = made / level.name
            folder.mkdir(parents=True, exist_ok=True)
            stem = built.built_stem(source, level)
            path = folder / f"{stem}.so"
            command = [compiler, *built.OPTIONS, *level.options, *WITHOUT_TRACES, "-o", str(path), source.name]
            subprocess.run(command, cwd=source.parent, check=True)
            return path.rename(folder / f"{stem}-{built.digest_of(path.read_bytes())}.so")

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            for path in pool.map(compile_one, jobs):
                inside = f"kvcellar/kernels/{built.BUILT}/{path.parent.name}/{path.name}"
                build_data["force_include"][str(path)] = inside
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_{GLIBC}_{machine}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        shutil.rmtree(Path(self.directory) / "kernels", ignore_errors=True)
