"""A user's cache directory of a test's own, with the libraries that are compiled already and the programs that are
recorded: compiling takes most of a minute, and recording seconds for each network."""

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
    for shared in _shared():
        if not (link := made / shared.name).exists():
            link.symlink_to(shared)
    monkeypatch.setenv("XDG_CACHE_HOME", str(directory))


@cache
def _shared() -> tuple[Path, ...]:
    """The compiled libraries in the cache of the user who runs the tests, and the directory of recordings."""
    try:
        for source in SOURCES.glob("*.cpp"):
            library(source, os.environ)
    except NotCompiled:
        return ()
    user = places.cache(os.environ)
    places.make_private(user / "recordings")
    return *user.glob("*.so"), user / "recordings"
