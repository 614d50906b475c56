"""The changelog and the package agree on the version."""

import re
from pathlib import Path

import kvcellar

CHANGELOG = (Path(__file__).parents[2] / "CHANGELOG.md").read_text()
HEADINGS = re.findall(r"^## \[(\d+)\.(\d+)\.(\d+)\] - (unreleased|\d{4}-\d{2}-\d{2})$", CHANGELOG, re.M)
KINDS = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_newest_entry_is_this_version():
    assert ".".join(HEADINGS[0][:3]) == kvcellar.__version__


def test_versions_fall_and_only_the_newest_is_unreleased():
    numbers = [tuple(map(int, h[:3])) for h in HEADINGS]
    assert numbers == sorted(set(numbers), reverse=True)
    assert "unreleased" not in [h[3] for h in HEADINGS[1:]]
    assert len(HEADINGS) == len(re.findall(r"^## ", CHANGELOG, re.M)), "a heading has another form"


def test_changes_are_of_the_usual_kinds():
    assert set(re.findall(r"^### (.+)$", CHANGELOG, re.M)) <= KINDS
