"""No module of ours imports itself through others, imports for types and inside functions included.

import-linter checks directions between packages only, and leaves out what stands under `TYPE_CHECKING`.
"""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"


def modules(src: Path) -> dict[str, Path]:
    """Every module under `src` by its dotted name."""
    names = {".".join(file.relative_to(src).with_suffix("").parts): file for file in src.rglob("*.py")}
    return {name.removesuffix(".__init__"): file for name, file in names.items()}


def imported(file: Path, known: set[str]) -> Iterator[str]:
    """The modules among `known` that a file imports, wherever in it. A package stands for its `__init__.py`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} has relative imports, which are not followed here"
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                if submodule in known:
                    yield submodule
                elif node.module in known:
                    yield node.module


def cycle(src: Path) -> list[str]:
    """The modules of one import cycle, each imported by the next; empty if there is none."""
    files = modules(src)
    graph = {name: {other for other in imported(file, set(files)) if name != other} for name, file in files.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_no_import_cycle() -> None:
    assert cycle(SRC) == []


@pytest.mark.parametrize(
    "text",
    [
        "from package.b import B",
        "from package import b",
        "import package.b",
        "def f():\n    from package import b",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from package.b import B",
    ],
)
def test_a_cycle_is_found_however_it_is_imported(text: str, tmp_path: Path) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "b.py").write_text("import package.a")
    (package / "a.py").write_text("import math")
    assert cycle(tmp_path) == []
    (package / "a.py").write_text(text)
    assert set(cycle(tmp_path)) == {"package.a", "package.b"}
