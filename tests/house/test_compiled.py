"""A library is made once, from what it is made of, and nobody but its owner can put something else in its place."""

import os
import shutil
import stat
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvcellar.compiled import COMPILERS, NotCompiled, library

FOUND = next((found for name in COMPILERS if (found := shutil.which(name))), None)
compiles = pytest.mark.skipif(FOUND is None, reason=f"none of {', '.join(COMPILERS)} is here")
ANSWER = 'extern "C" int answer() { return 42; }\n'


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "answer.cpp"
    path.write_text(ANSWER)
    return path


@pytest.fixture
def place(tmp_path: Path) -> dict[str, str]:
    return {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "cache")}


def script(path: Path, text: str) -> str:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def kept(place: Mapping[str, str]) -> list[Path]:
    return sorted(Path(place["XDG_CACHE_HOME"], "kvcellar").iterdir())


@compiles
def test_a_source_is_compiled_once(source, place, tmp_path) -> None:
    log = tmp_path / "log"
    place["CXX"] = script(tmp_path / "compiler", f'echo "$*" >> {log}; exec {FOUND} "$@"')
    for _ in range(2):
        assert library(source, place).answer() == 42
    assert [" -o " in line for line in log.read_text().splitlines()] == [False, True, False]
    (made,) = kept(place)
    assert made.suffix == ".so"
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700


@compiles
def test_another_source_and_other_words_to_the_compiler_are_another_library(source, place) -> None:
    library(source, place)
    source.write_text(ANSWER.replace("42", "43"))
    assert library(source, place).answer() == 43
    assert len(kept(place)) == 2
    assert library(source, {**place, "CXX": f"{FOUND} -DOTHER"}).answer() == 43
    assert len(kept(place)) == 3


@compiles
def test_what_does_not_compile_is_said_and_leaves_nothing(source, place) -> None:
    source.write_text("int answer() { return nobody; }\n")
    with pytest.raises(NotCompiled, match=r"cannot compile it: .*error: .*nobody"):
        library(source, place)
    assert kept(place) == []


@compiles
def test_a_damaged_library_is_named(source, place, tmp_path) -> None:
    library(source, place)
    (made,) = kept(place)
    place["XDG_CACHE_HOME"] = str(tmp_path / "other")
    damaged = tmp_path / "other" / "kvcellar" / made.name
    damaged.parent.mkdir(parents=True)
    damaged.write_bytes(b"\x7fELF and no more")
    with pytest.raises(NotCompiled, match=rf"{damaged} cannot be loaded .* delete it"):
        library(source, place)


def test_a_compiler_that_is_not_there_is_said(source, place) -> None:
    with pytest.raises(NotCompiled, match=r"\$CXX names /no/such, which is not there"):
        library(source, {**place, "CXX": "/no/such -O3"})
    with pytest.raises(NotCompiled, match="there is no C\\+\\+ compiler"):
        library(source, {**place, "PATH": ""})


def test_a_compiler_that_fails_is_said(source, place, tmp_path) -> None:
    place["CXX"] = script(tmp_path / "broken", "echo 'error: this CPU is unknown' >&2; exit 3")
    with pytest.raises(NotCompiled, match="broken cannot compile it: error: this CPU is unknown"):
        library(source, place)
    place["CXX"] = script(tmp_path / "mute", "exit 3")
    with pytest.raises(NotCompiled, match="mute cannot compile it: status 3"):
        library(source, place)


@compiles
def test_a_place_where_others_can_write_is_refused(source, place) -> None:
    directory = Path(place["XDG_CACHE_HOME"], "kvcellar")
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    with pytest.raises(NotCompiled, match=rf"others can write into {directory}"):
        library(source, place)


@compiles
def test_without_a_place_the_reason_names_it(source, place, tmp_path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotCompiled, match=rf"no place in {tmp_path}/file/kvcellar: Not a directory"):
        library(source, {**place, "XDG_CACHE_HOME": str(tmp_path / "file")})
    with pytest.raises(NotCompiled, match=rf"no place in {tmp_path}/file/.cache/kvcellar"):
        library(source, {"PATH": place["PATH"], "HOME": str(tmp_path / "file"), "XDG_CACHE_HOME": "not/absolute"})
