"""The site of the documentation is built without a warning, has every page, and asks no foreign host."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT as FOLDER

ROOT = Path(FOLDER)
pytestmark = pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed: `make .venv/.wheel`")
LOADED = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=[\"']?(?:https?:)?//([^/\"' >]+)")


def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    pages = {path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")}
    made = {path.relative_to(tmp_path / "site"): path.read_text() for path in (tmp_path / "site").rglob("*.html")}
    assert {path.with_name("index.html") if path.stem == "README" else path for path in pages} <= made.keys()
    assert {name for text in made.values() for name in LOADED.findall(text)} <= {""}
    assert (tmp_path / "site/search/search_index.json").stat().st_size > 100_000
