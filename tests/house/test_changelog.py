"""The changelog, the package and the manifests agree on the version."""

import re
import tomllib
from pathlib import Path

import kvcellar

ROOT = Path(__file__).parents[2]
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()
HEADINGS = re.findall(r"^## \[(\d+)\.(\d+)\.(\d+)\] - (unreleased|\d{4}-\d{2}-\d{2})$", CHANGELOG, re.M)
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_newest_entry_is_this_version():
    assert ".".join(HEADINGS[0][:3]) == kvcellar.__version__


def test_the_package_is_built_with_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert f'__version__ = "{kvcellar.__version__}"' in (ROOT / project["tool"]["hatch"]["version"]["path"]).read_text()


def test_manifests_run_the_image_of_this_version():
    texts = [path.read_text() for path in (ROOT / "deploy").rglob("*") if path.suffix in {".yaml", ".yml"}]
    found = [version for text in texts for version in re.findall(r"image: \S*/kvcellar:(\d+\.\d+\.\d+)$", text, re.M)]
    assert set(found) == {kvcellar.__version__}


def test_versions_fall_and_only_the_newest_is_unreleased():
    numbers = [tuple(map(int, h[:3])) for h in HEADINGS]
    assert numbers == sorted(set(numbers), reverse=True)
    assert "unreleased" not in [h[3] for h in HEADINGS[1:]]
    assert len(HEADINGS) == len(re.findall(r"^## ", CHANGELOG, re.M)), "a heading has another form"


def test_changes_are_of_the_usual_kinds():
    assert set(re.findall(r"^### (.+)$", CHANGELOG, re.M)) <= KINDS
