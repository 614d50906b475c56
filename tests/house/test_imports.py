"""What importing a module loads: those that need no torch load none, and the subcommand that starts fast no server."""

import subprocess
import sys
import tomllib
from pathlib import Path

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


def loaded(modules: list[str], *unwanted: str) -> list[str]:
    """Import modules in a new process, one by one; the first that loads something unwanted, and what that is."""
    code = (
        "import sys\nfrom importlib import import_module\n"
        f"for name in {modules}:\n    import_module(name)\n"
        f"    if found := sorted({set(unwanted)} & set(sys.modules)):\n        print(name, *found)\n        break\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.split()


def test_loads_neither_torch_nor_transformers():
    modules = ["kvcellar", *(module for name in NO_TORCH for module in modules_of(name))]
    assert len(modules) > 50
    assert loaded(modules, "torch", "transformers") == []
    assert loaded(["kvcellar.engine.models.seam"], "torch")[:1] == ["kvcellar.engine.models.seam"], (
        "what is loaded is noticed"
    )


def test_running_a_prompt_loads_no_server():
    """It would take a third of the time to the first token beyond the imports of torch and transformers."""
    assert loaded(["kvcellar.cli.run", "kvcellar.engine.load.build"], "kvcellar.serve", "starlette", "uvicorn") == []


def test_asking_a_server_loads_neither_an_engine_nor_what_a_server_consists_of():
    """It would take 2 s of CPU before the first byte is sent."""
    commands = [f"kvcellar.cli.{name}" for name in ("client", "top", "cache", "library")]
    unwanted = ("kvcellar.engine", "kvcellar.serve.http.server", "uvicorn", "pydantic", "jinja2", "torch")
    assert loaded([*commands, "kvcellar.serve.http.keys"], *unwanted) == []
