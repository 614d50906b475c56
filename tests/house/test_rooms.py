"""docs/rooms.md is up to date with the docstrings, and complete."""

from scripts.rooms import MAP, SRC, render


def test_map_is_what_the_docstrings_say():
    assert MAP.read_text() == render(), "run `make docs`"


def test_every_room_is_on_the_map():
    page = render()
    rooms = [p.parent.name + "/" for p in SRC.glob("*/__init__.py")]
    hall = [p.name for p in SRC.glob("*.py") if p.name != "__init__.py"]
    for name in [*rooms, *hall]:
        assert f"\n## {name}" in page, f"{name} has no place in the layers of pyproject.toml"


def test_every_room_and_file_says_what_it_is():
    for line in render().splitlines():
        assert not line.rstrip().endswith(":"), line
