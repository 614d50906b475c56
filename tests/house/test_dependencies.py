"""Every dependency is used, declared, explained and pinned; nothing else is imported."""

import ast
import re
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
RUN = [Requirement(r) for r in PROJECT["dependencies"]]
EXTRA = [
    Requirement(r)
    for extra in ("cluster", "encryption", "remote", "events", "otel")
    for r in PROJECT["optional-dependencies"][extra]
]
OF_TRANSFORMERS = [Requirement(r) for r in PROJECT["optional-dependencies"]["images"]]  # imported there only
TOOLS = [r for extra in ("dev", "release", "site") for r in PROJECT["optional-dependencies"][extra]]
DEV = [Requirement(r) for r in TOOLS if not r.startswith("kvcellar")]
OTEL = ("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
IMPORTED_AS = {"pillow": "PIL", "pyzmq": "zmq", **dict.fromkeys(OTEL, "opentelemetry")}
OF_TORCH = {"triton"}  # a dependency of torch itself, in builds for CUDA only, which choose its version
PINS = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M))


def imported() -> set[str]:
    """Top-level names of what the sources import from outside."""
    names: set[str] = set()
    for file in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names |= {n.name.split(".")[0] for n in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.add(node.module.split(".")[0])
    return names - set(sys.stdlib_module_names) - {"kvcellar"}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    assert imported() == {IMPORTED_AS.get(r.name, r.name) for r in RUN + EXTRA} | OF_TORCH


def test_every_one_has_a_tested_pin_inside_its_bounds():
    for requirement in RUN + EXTRA + OF_TRANSFORMERS + DEV:
        assert requirement.specifier.contains(PINS[requirement.name]), requirement.name


def test_torch_is_pinned_first():
    assert next(iter(PINS)) == "torch"


def test_every_one_has_its_line_of_why():
    page = (ROOT / "docs" / "dependencies.md").read_text()
    assert sorted(re.findall(r"^\| `([\w-]+)` \| \S", page, re.M)) == sorted(
        r.name for r in RUN + EXTRA + OF_TRANSFORMERS + DEV
    )
