"""A user's cache directory of a test's own, with the libraries that are compiled already: compiling takes most of a
minute."""

import os
from functools import cache
from pathlib import Path

import pytest

from kvcellar import places
from kvcellar.kernels.compiled import SOURCES, NotCompiled, library


def own_cache(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Within the test, `directory` is where the cache directories of programs are."""
    made = directory / "kvcellar"
    made.mkdir(0o700, parents=True, exist_ok=True)
    for compiled in _compiled():
        if not (link := made / compiled.name).exists():
            link.symlink_to(compiled)
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))


@cache
def _compiled() -> tuple[Path, ...]:
    """The compiled libraries in the cache of the user who runs the tests."""
    try:
        for source in SOURCES.glob("*.cpp"):
            library(source, os.environ)
    except NotCompiled:
        return ()
    return tuple(places.cache(os.environ).glob("*.so"))
