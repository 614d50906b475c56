"""docs/source-map.md is up to date with the docstrings, and complete."""

from scripts.source_map import PAGE, SRC, render


def test_the_page_is_up_to_date():
    assert PAGE.read_text() == render(), "run `make docs`"


def test_every_package_is_in_the_layers():
    page = render()
    packages = [p.parent.name + "/" for p in SRC.glob("*/__init__.py")]
    files = [p.name for p in SRC.glob("*.py") if p.name != "__init__.py"]
    for name in [*packages, *files]:
        assert f"\n## {name}" in page, f"{name} is not in the layers of pyproject.toml"


def test_every_package_and_file_has_a_description():
    for line in render().splitlines():
        assert not line.rstrip().endswith(":"), line
