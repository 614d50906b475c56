"""Importing the modules listed as free of torch loads neither torch nor transformers."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
NO_TORCH = next(c for c in CONTRACTS if c["id"] == "no-torch")["source_modules"]


def modules_of(name: str) -> list[str]:
    """The module, or the package and every module in it, as dotted names."""
    path = ROOT / "src" / name.replace(".", "/")
    if not path.is_dir():
        return [name]
    files = sorted(path.rglob("*.py"))
    return [".".join(f.relative_to(ROOT / "src").with_suffix("").parts).removesuffix(".__init__") for f in files]


@pytest.mark.parametrize("name", ["kvcellar", *(m for name in NO_TORCH for m in modules_of(name))])
def test_loads_neither_torch_nor_transformers(name):
    code = f"import sys, {name}; print(*sorted({{'torch', 'transformers'}} & set(sys.modules)))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [], f"importing {name} loads {run.stdout.split()}"
