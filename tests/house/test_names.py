"""What the package offers is a list, and the list is true."""

import ast
import importlib
import types
from pathlib import Path

import pytest

import kvcellar

SRC = Path(kvcellar.__file__).parent


def packages_with_names() -> list[str]:
    """Every package of kvcellar with `__all__`."""
    found = []
    for file in sorted(SRC.rglob("__init__.py")):
        targets = [t for n in ast.parse(file.read_text()).body if isinstance(n, ast.Assign) for t in n.targets]
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            found.append(".".join(["kvcellar", *file.parent.relative_to(SRC).parts]))
    return found


@pytest.mark.parametrize("package", packages_with_names())
def test_every_name_is_there_and_in_order(package):
    room = importlib.import_module(package)
    assert list(room.__all__) == sorted(room.__all__)
    for name in room.__all__:
        assert getattr(room, name) is not None, f"{package}.{name}"


def test_what_is_visible_is_what_is_listed():
    assert dir(kvcellar) == kvcellar.__all__
    theirs = {"TYPE_CHECKING", "import_module"}  # what the file itself imports
    seen = {n for n, v in vars(kvcellar).items() if not n.startswith("_") and not isinstance(v, types.ModuleType)}
    assert seen - theirs <= set(kvcellar.__all__)


def test_the_error_for_an_unknown_name_lists_all_names():
    with pytest.raises(AttributeError, match=r"no public name 'Motor'.*Engine"):
        kvcellar.Motor  # noqa: B018


def test_every_public_error_is_ours():
    for name in kvcellar.__all__:
        thing = getattr(kvcellar, name)
        if isinstance(thing, type) and issubclass(thing, Exception):
            assert issubclass(thing, kvcellar.KvcellarError), name
