"""Libraries that a wheel brings are used where the CPU has what they need and their bytes are intact, and no others."""

import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

import hatch_build
from kvcellar.kernels import built
from kvcellar.kernels.built import LEVELS, OPTIONS, Level, built_stem, digest_of, level_here, level_of
from kvcellar.kernels.compiled import SOURCES, NotCompiled, compiled_for, library

GXX = shutil.which("g++")
ON_X86 = pytest.mark.skipif(GXX is None or platform.machine() != "x86_64", reason="g++ for x86-64 is not here")
ANY = Level("any", (), frozenset())
FEATURES = {  # of macros that GCC defines, beside those that each CPU of the kind has
    "__ABM__": "abm", "__AMX_BF16__": "amx_bf16", "__AMX_TILE__": "amx_tile", "__AVX2__": "avx2",
    "__AVX512BF16__": "avx512_bf16", "__AVX512BW__": "avx512bw", "__AVX512CD__": "avx512cd",
    "__AVX512DQ__": "avx512dq", "__AVX512F__": "avx512f", "__AVX512VBMI__": "avx512vbmi",
    "__AVX512VL__": "avx512vl", "__AVX512VNNI__": "avx512_vnni", "__AVX__": "avx", "__BMI2__": "bmi2",
    "__BMI__": "bmi1", "__CRC32__": "sse4_2", "__F16C__": "f16c", "__FMA__": "fma", "__LAHF_SAHF__": "lahf_lm",
    "__LZCNT__": "abm", "__MOVBE__": "movbe", "__POPCNT__": "popcnt", "__SSE3__": "pni", "__SSE4_1__": "sse4_1",
    "__SSE4_2__": "sse4_2", "__SSSE3__": "ssse3", "__XSAVE__": "xsave", "__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16": "cx16",
}  # fmt: skip
EACH = {"__FXSR__", "__MMX__", "__MMX_WITH_SSE__", "__SSE2_MATH__", "__SSE2__", "__SSE_MATH__", "__SSE__"}


def macros(options: tuple[str, ...]) -> set[str]:
    """Those that say what a CPU has to have."""
    assert GXX is not None
    command = [GXX, *options, "-dM", "-E", "-x", "c++", os.devnull]
    every = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    names = set(re.findall(r"#define (\w+) ", every))
    plain = "|".join(
        ["ABM", "AMX", "AVX", "BMI", "CRC32", "F16C", "FMA", "LAHF", "LZCNT", "MOVBE", "POPCNT", "SSE", "SSSE"]
    )
    return {one for one in names if re.match(rf"__({plain}|XSAVE|FXSR|MMX|GCC_HAVE_SYNC_COMPARE_AND_SWAP_16)", one)}


@ON_X86
@pytest.mark.parametrize("level", LEVELS["x86_64"], ids=lambda one: one.name)
def test_a_level_asks_for_all_that_its_options_let_the_compiler_use(level: Level) -> None:
    needed = {FEATURES[one] for one in macros(level.options) - EACH}
    assert needed <= level.features


def test_a_cpu_gets_the_best_level_of_which_it_has_all_features() -> None:
    for machine, levels in LEVELS.items():
        for at, level in enumerate(levels):
            assert level_of(machine, level.features | {"another"}) == level
            assert not any(worse.features >= level.features for worse in levels[at + 1 :])
            for missing in level.features:
                found = level_of(machine, level.features - {missing})
                assert found in levels[at + 1 :]
        assert levels[-1].features == frozenset()
    assert level_of("riscv64", frozenset()) is None


def cpuinfo(path: Path, *cores: str) -> Path:
    path.write_text("".join(f"processor\t: {at}\n{core}\n\n" for at, core in enumerate(cores)))
    level_here.cache_clear()
    return path


@pytest.mark.parametrize(("machine", "name"), [("x86_64", "flags\t\t"), ("aarch64", "Features\t")])
def test_of_several_kinds_of_cores_that_counts_what_all_have(machine, name, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    best, *_, last = LEVELS[machine]
    full, plain = f"{name}: {' '.join(best.features)}", f"{name}: fpu"
    try:
        assert level_here(cpuinfo(tmp_path / "same", full, full)) == best
        assert level_here(cpuinfo(tmp_path / "mixed", full, plain)) == last
        assert level_here(cpuinfo(tmp_path / "unknown", "model name: a CPU")) is None
        assert level_here(tmp_path / "missing") is None
    finally:
        level_here.cache_clear()


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One whose library was built with 42, and that a compiler would make the same of."""
    monkeypatch.setattr(built, "level_here", lambda: ANY)
    path = tmp_path / "answer.cpp"
    path.write_text('extern "C" int answer() { return 42; }\n')
    return path


def build(source: Path) -> Path:
    assert GXX is not None
    folder = source.parent / built.BUILT / ANY.name
    folder.mkdir(parents=True)
    made = folder / "made.so"
    subprocess.run([GXX, *OPTIONS, "-o", str(made), str(source)], check=True)
    return made.rename(folder / f"{built_stem(source, ANY)}-{digest_of(made.read_bytes())}.so")


@ON_X86
def test_a_library_that_was_brought_needs_no_compiler_and_no_cache(source, tmp_path) -> None:
    build(source)
    nothing = {"PATH": "/nothing", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert library(source, nothing).answer() == 42
    assert not (tmp_path / "cache").exists()


@ON_X86
@pytest.mark.parametrize("harm", ["content", "source"])
def test_a_library_with_other_bytes_or_of_another_source_is_not_loaded(harm, source, tmp_path, caplog) -> None:
    made = build(source)
    if harm == "content":
        content = bytearray(made.read_bytes())
        content[len(content) // 2] ^= 1
        made.write_bytes(content)
    else:
        source.write_text(source.read_text().replace("42", "43"))
    with pytest.raises(NotCompiled, match=r"there is no C\+\+ compiler"):
        library(source, {"PATH": "/nothing"})
    there = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert library(source, there).answer() == (42 if harm == "content" else 43)
    assert ("is damaged" in caplog.text) == (harm == "content")
    assert made.exists(), "it is the package's"


@ON_X86
def test_a_compiler_that_is_named_is_used(source, tmp_path) -> None:
    build(source)
    there = {"PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(tmp_path / "cache"), "CXX": f"{GXX} -DNAMED"}
    assert library(source, there).answer() == 42
    assert len(list((tmp_path / "cache/kvcellar").iterdir())) == 1


def test_what_was_compiled_for_is_the_level_where_libraries_were_brought(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("kvcellar.kernels.compiled.folder_of", lambda source: (ANY, tmp_path))
    assert compiled_for({"PATH": "/nothing"}) == b"built for any"


@ON_X86
def test_the_same_compiler_makes_the_same_bytes_in_any_place(tmp_path) -> None:
    made = list[bytes]()
    for place in ("here", "there"):
        shutil.copytree(SOURCES, tmp_path / place)
        assert GXX is not None
        command = [GXX, *OPTIONS, *hatch_build.WITHOUT_TRACES, "-O0", "-o", "made.so", "threads.cpp"]
        subprocess.run(command, cwd=tmp_path / place, check=True)
        made.append((tmp_path / place / "made.so").read_bytes())
    assert made[0] == made[1]


# Writes what a compiler could leave in a library: its arguments but for the place of the result, and the source.
COMPILER = """#!/bin/sh
for source; do out=$before; before=$source; done
{ printf '%s\\n' "$@" | grep -vxF "$out"; cat "$source"; } > "$out"
"""
PACKED = ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", "CHANGELOG.md", ".gitignore", "src")


def packed(place: Path, compiler: Path, umask: int, zone: str) -> dict[str, str]:
    """Digests of an sdist and a wheel of a copy of this repository, by name. The copy has no weights."""
    root, old = Path(hatch_build.__file__).parent, os.umask(umask)
    try:
        for name in PACKED:
            if (root / name).is_dir():
                shutil.copytree(root / name, place / name, ignore=shutil.ignore_patterns("*.safetensors"))
            else:
                place.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(root / name, place / name)
        for path in place.rglob("*"):
            os.utime(path, (umask, umask))
        more = {"SOURCE_DATE_EPOCH": "1000000000", "KVCELLAR_KERNELS": "x86_64", "CXX": str(compiler), "TZ": zone}
        subprocess.run(
            [sys.executable, "-m", "hatchling", "build"],
            cwd=place, env=os.environ | more, umask=umask, check=True, capture_output=True,
        )  # fmt: skip
    finally:
        os.umask(old)
    return {path.name: digest_of(path.read_bytes()) for path in (place / "dist").iterdir()}


def test_wheel_and_sdist_are_packed_with_the_same_bytes_in_any_place(tmp_path) -> None:
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    here = packed(tmp_path / "here", compiler, 0o022, "UTC")
    there = packed(tmp_path / "another/place/there", compiler, 0o077, "Asia/Tokyo")
    assert here == there
    assert sorted(name.rpartition(".")[2] for name in here) == ["gz", "whl"]
    (wheel,) = (tmp_path / "here/dist").glob("*.whl")
    names = ZipFile(wheel).namelist()
    sources = len(list(SOURCES.glob("*.cpp")))
    assert sum(name.endswith(".so") for name in names) == sources * len(LEVELS["x86_64"])
    assert "kvcellar/py.typed" in names


EMULATED = ("aarch64-linux-gnu-g++", "qemu-aarch64-static")
ARM_LIBRARIES = "/usr/aarch64-linux-gnu"


@pytest.mark.skipif(not all(map(shutil.which, EMULATED)), reason=f"{' and '.join(EMULATED)} are not here")
@pytest.mark.parametrize(
    ("level", "names"),
    [
        pytest.param("neon", ("linear", "threads"), id="neon"),
        pytest.param("neon", None, id="neon, all", marks=pytest.mark.slow),
        pytest.param("bf16", None, id="bf16, all", marks=pytest.mark.slow),
    ],
)
def test_libraries_for_arm_load_and_compute_linear_layers_in_an_emulator(level, names, tmp_path) -> None:
    compiler, emulator = EMULATED
    (options,) = (one.options for one in LEVELS["aarch64"] if one.name == level)
    sources = [one for one in sorted(SOURCES.glob("*.cpp")) if names is None or one.stem in names]
    for source in sources:
        subprocess.run(
            [compiler, *OPTIONS, *options, "-o", str(tmp_path / f"{source.stem}.so"), str(source)], check=True
        )
    program = tmp_path / "program"
    driver = [
        compiler,
        "-std=c++17",
        "-O1",
        f"-I{SOURCES}",
        "-o",
        str(program),
        str(Path(__file__).parent / "loads_all.cpp"),
    ]
    subprocess.run(driver, check=True)
    paths = [str(tmp_path / f"{source.stem}.so") for source in sources]
    run = subprocess.run(
        [emulator, "-L", ARM_LIBRARIES, str(program), *paths], capture_output=True, text=True, check=False
    )
    assert (run.returncode, run.stdout) == (0, "float32 right, bfloat16 right\n")
