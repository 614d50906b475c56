"""`make check` runs the tests that are nearest to what changed."""

from pathlib import Path

import pytest

from scripts.check import nearest

FILES = {
    "src/kvcellar/__init__.py": "",
    "src/kvcellar/memory/spans.py": "",
    "src/kvcellar/cells.py": "from kvcellar.memory.spans import Span",
    "src/kvcellar/engine.py": "import kvcellar.cells",
    "tests/__init__.py": "",
    "tests/world.py": "from kvcellar import engine",
    "tests/test_cells.py": "from kvcellar.cells import Cells",
    "tests/test_engine.py": "from tests.world import World",
    "tests/test_spans.py": "def test():\n    from kvcellar.memory.spans import Span",
    "tests/test_page.py": "PAGE = 'docs/page.md'",
    "benchmarks/__init__.py": "",
    "scripts/tool.py": "",
}


@pytest.mark.parametrize(
    ("path", "tests"),
    [
        ("src/kvcellar/memory/spans.py", ["spans", "cells", "engine"]),
        ("src/kvcellar/engine.py", ["engine"]),
        ("tests/test_cells.py", ["cells"]),
        ("docs/page.md", ["page"]),
        ("docs/another.md", []),
    ],
)
def test_tests_that_import_or_name_what_changed_are_found_the_nearest_first(tmp_path: Path, path, tests) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert [found.stem.removeprefix("test_") for found in nearest([path], tmp_path)] == tests
