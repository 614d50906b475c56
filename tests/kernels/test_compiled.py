"""A library is compiled once per input, is loaded only when it is intact, and only its owner can replace it."""

import ctypes
import errno
import hashlib
import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from kvcellar.kernels.compiled import COMPILERS, OPTIONS, SOURCES, NotCompiled, library
from kvcellar.kernels.structures import constant, structure
from kvcellar.progress import Progress, listening

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
    assert [" -o " in line for line in log.read_text().splitlines()] == [False, True], "asked what it is, and run, once"
    (made,) = kept(place)
    assert made.suffix == ".so"
    assert stat.S_IMODE(made.parent.stat().st_mode) == 0o700


@compiles
def test_another_compiler_of_the_same_name_is_asked_what_it_is(source, place, tmp_path) -> None:
    place["CXX"] = script(tmp_path / "compiler", f'exec {FOUND} "$@"')
    assert library(source, place).answer() == 42
    script(tmp_path / "compiler", f'exec {FOUND} -DOTHER "$@"')
    assert library(source, place).answer() == 42
    assert len(kept(place)) == 2


@compiles
def test_another_source_and_other_words_to_the_compiler_are_another_library(source, place) -> None:
    library(source, place)
    source.write_text(ANSWER.replace("42", "43"))
    assert library(source, place).answer() == 43
    assert len(kept(place)) == 2
    assert library(source, {**place, "CXX": f"{FOUND} -DOTHER"}).answer() == 43
    assert len(kept(place)) == 3


@compiles
def test_another_header_is_another_library(source, place) -> None:
    source.write_text('#include "outer.h"\nextern "C" int answer() { return VALUE; }\n')
    source.with_name("outer.h").write_text('#include "inner.h"\n')
    source.with_name("inner.h").write_text("#define VALUE 42\n")
    assert library(source, place).answer() == 42
    source.with_name("inner.h").write_text("#define VALUE 43\n")
    assert library(source, place).answer() == 43


@compiles
def test_what_does_not_compile_is_said_and_leaves_nothing(source, place) -> None:
    source.write_text("int answer() { return missing; }\n")
    with pytest.raises(NotCompiled, match=r"cannot compile it: .*error: .*missing"):
        library(source, place)
    assert kept(place) == []


def truncated(content: bytes, to: float) -> bytes:
    return content[: int(len(content) * to)]


def flipped(content: bytes, at: float) -> bytes:
    place = int((len(content) - 1) * at)
    return content[:place] + bytes([content[place] ^ 0x10]) + content[place + 1 :]


def zeroed(content: bytes, start: float) -> bytes:
    """Of the right length, with zeros where the pages never reached the disk."""
    kept = int(len(content) * start)
    return content[:kept] + bytes(len(content) - kept)


DAMAGES = {
    **{f"cut at {to:.0%}": (truncated, to) for to in (0.0, 0.01, 0.3, 0.7, 0.999)},
    **{f"a bit flipped at {at:.0%}": (flipped, at) for at in (0.0, 0.02, 0.4, 0.9, 1.0)},
    **{f"zeros from {start:.0%} on": (zeroed, start) for start in (0.0, 0.25, 0.75)},
}


@compiles
@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_library_is_never_loaded_and_is_compiled_again(source, place, monkeypatch, caplog, damage) -> None:
    library(source, place)
    (made,) = kept(place)
    whole, (damaged, where) = made.read_bytes(), damage
    made.unlink()  # the library is mapped into this process: its file must not be changed under it
    made.write_bytes(damaged(whole, where))
    loaded = []
    monkeypatch.setattr("ctypes.CDLL", lambda path: loaded.append(Path(path).read_bytes()))
    library(source, place)
    (again,) = kept(place)
    assert loaded == [again.read_bytes()]
    assert again.stem.endswith(hashlib.sha256(loaded[0]).hexdigest()[:32])
    assert f"{made} is damaged" in caplog.text


@compiles
def test_the_name_of_a_library_has_the_digest_of_its_content(source, place) -> None:
    library(source, place)
    (made,) = kept(place)
    assert made.stem.rpartition("-")[2] == hashlib.sha256(made.read_bytes()).hexdigest()[:32]


@compiles
def test_something_else_under_the_name_of_a_library_is_replaced_or_left(source, place, caplog) -> None:
    library(source, place)
    (made,) = kept(place)
    made.unlink()
    made.mkdir()
    with pytest.raises(NotCompiled, match="its library cannot be kept in"):
        library(source, place)
    assert f"{made} cannot be deleted" in caplog.text


@compiles
def test_a_library_is_on_the_disk_before_it_has_its_name_and_its_name_before_it_is_loaded(
    source, place, monkeypatch
) -> None:
    happened = []
    for name in ("fsync", "replace"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real, **k: (happened.append(name), real(*a, **k))[1])
    monkeypatch.setattr("ctypes.CDLL", lambda path: happened.append("load"))
    library(source, place)
    assert happened == ["fsync", "replace", "fsync", "load"]


@compiles
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_full_disk_is_named_and_leaves_nothing(source, place, monkeypatch, call) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(os, call, full)
        with pytest.raises(NotCompiled, match=r"cannot be kept in .*kvcellar: no space left on its disk"):
            library(source, place)
        assert kept(place) == []
    assert library(source, place).answer() == 42


def test_a_compiler_without_space_is_said_to_have_none(source, place, tmp_path) -> None:
    stderr = "ld: final link failed: No space left on device\\ncollect2: error: ld returned 1 exit status"
    probe = 'case "$*" in *-dM*) exit 0;; esac'
    place["CXX"] = script(tmp_path / "full", f"{probe}; printf '{stderr}' >&2; exit 1")
    with pytest.raises(NotCompiled, match="full cannot compile it: no space left on the disk"):
        library(source, place)


@compiles
def test_a_directory_that_is_read_only_serves_what_it_has(source, place, monkeypatch) -> None:
    library(source, place)

    def refused(*_: object, **__: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.mkdtemp", refused)  # a superuser can write into any directory by its mode
    assert library(source, place).answer() == 42
    source.write_text(ANSWER.replace("42", "43"))
    with pytest.raises(NotCompiled, match=r"cannot be kept in .*: Read-only file system"):
        library(source, place)


@compiles
def test_processes_that_compile_at_the_same_time_all_get_a_whole_library(source, place) -> None:
    code = "from pathlib import Path; import os, sys; from kvcellar.kernels.compiled import library; " + (
        "sys.stdin.read(); assert library(Path(sys.argv[1]), os.environ).answer() == 42"
    )
    environment = {**place, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", code, str(source)]
    processes = [subprocess.Popen(command, env=environment, stdin=subprocess.PIPE) for _ in range(3)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.close()
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert all(path.suffix == ".so" for path in kept(place))
    assert library(source, place).answer() == 42


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


def test_what_a_listener_raises_ends_the_compiler_and_what_it_has_started(source, place, tmp_path) -> None:
    started, ended = tmp_path / "started", tmp_path / "ended"
    os.mkfifo(ended)
    probe = 'case "$*" in *-dM*) exit 0;; esac'
    child = f"(exec 3>{ended}; echo >{started}; exec sleep 600) &"  # 3 is closed when the child has ended
    place["CXX"] = script(tmp_path / "slow", f"{probe}; {child} wait")
    reader = os.open(ended, os.O_RDONLY | os.O_NONBLOCK)

    def stop(progress: Progress) -> None:
        if started.exists():
            raise InterruptedLoad

    with listening(stop), pytest.raises(InterruptedLoad):
        library(source, place)
    os.set_blocking(reader, True)
    assert os.read(reader, 1) == b""
    os.close(reader)
    assert kept(place) == []


class InterruptedLoad(Exception):
    pass


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
    with pytest.raises(NotCompiled, match=rf"no place: \$HOME, {tmp_path}/file, is not a directory"):
        library(source, {"PATH": place["PATH"], "HOME": str(tmp_path / "file"), "XDG_CACHE_HOME": "not/absolute"})


FIELDS = {  # structures that Python fills, by source
    "attention.cpp": ("Call", "Plane"),
    "store.cpp": ("Call", "New", "Plane"),
    "experts.cpp": ("Call", "Layer", "LayerCall", "Part"),
    "heads.cpp": ("Call",),
    "step.cpp": ("Rows",),
}


@compiles
@pytest.mark.parametrize("name", FIELDS)
def test_python_and_cpp_have_the_same_fields(name: str, source: Path) -> None:
    """A compiler says so that only reads the source."""
    numbers = dict[str, int]()
    for kind in FIELDS[name]:
        made = structure(SOURCES / name, kind)
        numbers |= {f"offsetof({kind}, {field})": getattr(made, field).offset for field, _ in made._fields_}
        numbers[f"sizeof({kind})"] = ctypes.sizeof(made)
    same = "".join(f'static_assert({place} == {number}, "");\n' for place, number in numbers.items())
    source.write_text(f'#include <cstddef>\n#include "{SOURCES / name}"\n{same}')
    ran = subprocess.run([str(FOUND), *OPTIONS, "-fsyntax-only", str(source)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr


def test_a_structure_that_is_not_known_raises(tmp_path: Path) -> None:
    (tmp_path / "other.cpp").write_text("struct Call {\n    short x;\n};\nconst int MOST = 3;\n")
    with pytest.raises(AssertionError, match=r"other\.cpp and its headers have 0 definitions of short"):
        structure(tmp_path / "other.cpp", "Call")
    assert constant(tmp_path / "other.cpp", "MOST") == 3
