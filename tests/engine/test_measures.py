"""What was measured is kept for the next start: the same bytes, for the same inputs only, never from a damaged file."""

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvcellar import Engine
from kvcellar.engine.load import reserve
from kvcellar.engine.load.step_bytes import FORMAT, Measures, SizesFiles, facts_of, measures_of
from kvcellar.engine.models.build_guest import build_guest
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.recording import facts
from kvcellar.engine.recording.facts import Unsettled, digest, identities, installed, source_digest
from kvcellar.engine.recording.kept import MOST_BYTES, MOST_STORED, Kept, place_of
from kvcellar.engine.recording.record import record
from kvcellar.engine.recording.replay import Replay
from kvcellar.memory.attention.choose import named
from kvcellar.memory.shapes import StoredAs
from tests.own_cache import own_cache
from tests.zoo import ARCHS

pytestmark = pytest.mark.measures

INPUTS = digest({"of": "these tests"})
OTHER = digest({"of": "others"})


def unmeasured() -> int:
    raise AssertionError("it was measured again")


def kept(directory: Path, **sizes: int) -> Path:
    """A file with these measures; the only one."""
    measures = of_file(directory)
    for step, size in sizes.items():
        measures.of(step, lambda size=size: size)
    measures.keep()
    (file,) = directory.iterdir()
    return file


# -- the file ---------------------------------------------------------------------------------------------------------


def of_file(directory: Path, inputs: str = INPUTS) -> Measures:
    return Measures(files=SizesFiles(directory), inputs=inputs)


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    kept(tmp_path, a=5, b=0)
    again = of_file(tmp_path)
    assert (again.of("a", unmeasured), again.of("b", unmeasured)) == (5, 0)
    before = [file.stat().st_mtime_ns for file in tmp_path.iterdir()]
    again.keep()
    assert [file.stat().st_mtime_ns for file in tmp_path.iterdir()] == before, "nothing new, and it was written"


def test_a_step_is_measured_once_even_where_nothing_is_kept() -> None:
    calls: list[int] = []
    measures = Measures()
    assert [measures.of("a", lambda: calls.append(1) or 7) for _ in range(3)] == [7, 7, 7]
    measures.keep()
    assert len(calls) == 1


def test_measures_of_other_inputs_are_not_seen(tmp_path: Path) -> None:
    kept(tmp_path, a=5)
    assert of_file(tmp_path, OTHER).of("a", lambda: 6) == 6


def test_a_file_that_was_renamed_to_other_inputs_is_not_used(tmp_path: Path) -> None:
    file = kept(tmp_path, a=5)
    file.rename(tmp_path / file.name.replace(INPUTS, OTHER))
    assert of_file(tmp_path, OTHER).of("a", lambda: 6) == 6


def test_later_measures_join_the_earlier_ones_even_if_both_began_without(tmp_path: Path) -> None:
    one, other = of_file(tmp_path), of_file(tmp_path)
    one.of("a", lambda: 1)
    other.of("b", lambda: 2)
    one.keep()
    other.keep()
    again = of_file(tmp_path)
    assert (again.of("a", unmeasured), again.of("b", unmeasured)) == (1, 2)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_with_any_change_is_a_miss_and_is_written_again(tmp_path: Path, data: st.DataObject) -> None:
    for file in tmp_path.iterdir():
        file.unlink()
    file = kept(tmp_path, a=123456, b=7)
    whole = file.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    damage: dict[str, Callable[[], bytes]] = {
        "cut": lambda: whole[:at],
        "flipped": lambda: whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :],
        "put in": lambda: whole[:at] + data.draw(st.binary(min_size=1, max_size=9)) + whole[at:],
        "another": lambda: data.draw(st.binary(max_size=99)),
    }
    file.write_bytes(damage[data.draw(st.sampled_from(sorted(damage)))]())
    again = of_file(tmp_path)
    assert again.of("a", lambda: 99) == 99
    again.keep()
    assert of_file(tmp_path).of("a", unmeasured) == 99


@pytest.mark.parametrize(
    "content", [*({"a": size} for size in (-1, 5.0, True, "5", None, 1 << 60, [5])), [5], {}, {5: 5}, None]
)
def test_a_file_of_another_form_is_a_miss_even_with_the_right_digest(tmp_path: Path, content: Any) -> None:
    Kept[Any](tmp_path, FORMAT, msgspec.msgpack.encode, msgspec.msgpack.decode).write(INPUTS, content)
    assert of_file(tmp_path).of("a", lambda: 6) == 6


@pytest.mark.parametrize("stored", [b"", b"\xc1", b"\x91" * 9000, bytes(MOST_BYTES), b"\x81\xa1a"])
def test_no_content_of_a_file_ends_a_start(tmp_path: Path, stored: bytes) -> None:
    Kept[bytes](tmp_path, FORMAT, bytes, bytes).write(INPUTS, stored)
    assert list(tmp_path.iterdir())
    assert of_file(tmp_path).of("a", lambda: 6) == 6


@pytest.mark.parametrize("kind", ["link", "directory", "pipe", "unreadable", "large"])
def test_what_is_no_file_of_ours_is_a_miss(tmp_path: Path, kind: str) -> None:
    file = kept(tmp_path, a=5)
    elsewhere = tmp_path / "elsewhere"
    file.rename(elsewhere)
    make: dict[str, Callable[[], Any]] = {
        "link": lambda: file.symlink_to(elsewhere),
        "directory": file.mkdir,
        "pipe": lambda: os.mkfifo(file),
        "unreadable": lambda: file.touch(0o000),
        "large": lambda: file.write_bytes(elsewhere.read_bytes() + bytes(MOST_STORED)),
    }
    make[kind]()
    measures = of_file(tmp_path)
    assert measures.of("a", lambda: 6) == 6
    measures.keep()


def test_the_directory_is_the_users_alone(tmp_path: Path) -> None:
    directory = place_of("steps", {"XDG_CACHE_HOME": str(tmp_path / "new")})
    assert directory is not None
    assert directory == tmp_path / "new/kvcellar/steps"
    assert directory.stat().st_mode & 0o777 == 0o700
    directory.chmod(0o777)
    assert place_of("steps", {"XDG_CACHE_HOME": str(tmp_path / "new")}) is None
    (tmp_path / "file").touch()
    assert place_of("steps", {"XDG_CACHE_HOME": str(tmp_path / "file")}) is None
    assert place_of("steps", {"HOME": str(tmp_path / "absent")}) is None


@pytest.mark.parametrize("failing", ["tempfile.NamedTemporaryFile", "os.replace"])
def test_a_disk_that_takes_nothing_costs_the_measures_alone(tmp_path: Path, failing: str) -> None:
    measures = of_file(tmp_path)
    measures.of("a", lambda: 5)
    with mock.patch(f"kvcellar.engine.recording.kept.{failing}", side_effect=OSError(28, "No space left on device")):
        measures.keep()
    assert list(tmp_path.iterdir()) == []


def test_starts_at_the_same_time_leave_a_whole_file(tmp_path: Path) -> None:
    together = threading.Barrier(8)

    def start(number: int) -> None:
        for round_ in range(10):
            together.wait()
            measures = of_file(tmp_path)
            assert measures.of("a", lambda: 5) == 5
            measures.of(f"{number} {round_}", lambda: number)
            measures.keep()

    threads = [threading.Thread(target=start, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert of_file(tmp_path).of("a", unmeasured) == 5
    assert len(list(tmp_path.iterdir())) == 1


# -- what they depend on ----------------------------------------------------------------------------------------------

LIMITS = {"context": 64, "step_tokens": 32, "max_sequences": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    ARCHS["llama"].build().save_pretrained(path)
    return path


def of(guest: Guest, path: Path, **other: Any) -> dict[str, Any]:
    how = {"began": LONG_SINCE, "limits": LIMITS, "environment": {}, **other}
    return facts_of(guest, path, **how)


LONG_SINCE = time.time_ns() + 10**15  # a load that begins long after the files of these tests were written


def llama(**config: Any) -> Guest:
    return build_guest(ARCHS["llama"].build(**config), named("sdpa"))


def test_the_same_model_has_the_same_facts_each_time(model: Path) -> None:
    once = of(llama(), model)
    assert once == of(llama(), model)
    assert " at 0x" not in json.dumps(once), "an address is another one each time"


@pytest.mark.parametrize("name", ["gemma3", "lfm3", "mamba2", "gpt-oss", "deepseek-v2", "bloom"])
def test_facts_of_any_kind_of_model_are_the_same_each_time(model: Path, name: str) -> None:
    first, second = (digest(of(build_guest(ARCHS[name].build(), named("sdpa")), model)) for _ in range(2))
    assert first == second


def test_each_fact_counts(model: Path) -> None:
    once = of(llama(), model)
    seen = {digest(once)}
    for name, fact in once.items():
        seen.add(digest({**once, name: [fact, "and more"]}))
        seen.add(digest({other: once[other] for other in once if other != name}))
    assert len(seen) == 1 + 2 * len(once)


def recorded(guest: Guest) -> Guest:
    record(guest, lambda program: Replay(program, guest.model))
    assert guest.recording is not None
    return guest


CHANGES: dict[str, Callable[[Guest], Guest]] = {
    "recorded": recorded,
    "kv_dtype": lambda guest: guest.storing(StoredAs.parse("int8"), named("sdpa")),
    "attention": lambda _: build_guest(ARCHS["llama"].build(), named("reference")),
    "dtype": lambda _: build_guest(ARCHS["llama"].build().bfloat16(), named("sdpa")),
    "config": lambda _: llama(rope_theta=5000.0),
    "size": lambda _: llama(intermediate_size=ARCHS["llama"].build().config.intermediate_size + 8),
    "class": lambda _: build_guest(ARCHS["qwen2"].build(), named("sdpa")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_model_has_other_facts(model: Path, change: str) -> None:
    guest = llama()
    once = digest(of(guest, model))
    assert digest(of(CHANGES[change](guest), model)) != once


def test_other_limits_variables_threads_and_flags_are_other_facts(model: Path) -> None:
    guest = llama()
    seen = [digest(of(guest, model))]
    for name in LIMITS:
        seen.append(digest(of(guest, model, limits={**LIMITS, name: 3})))
    for variable in ("ONEDNN_VERBOSE", "ATEN_CPU_CAPABILITY", "OMP_NUM_THREADS", "TORCH_LOGS", "USE_HUB_KERNELS"):
        seen.append(digest(of(guest, model, environment={variable: "3"})))
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    try:
        torch.set_num_threads(threads + 1)
        seen.append(digest(of(guest, model)))
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision("medium")
        seen.append(digest(of(guest, model)))
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
    for switch in ("kvcellar.engine.recording.facts.torch.backends.cuda.math_sdp_enabled", "platform.machine"):
        with mock.patch(switch, return_value="other"):
            seen.append(digest(of(guest, model)))
    for version in ("torch.__version__", "torch.version.git_version", "sys.version"):
        with mock.patch(f"kvcellar.engine.recording.facts.{version}", "other"):
            seen.append(digest(of(guest, model)))
    assert digest(of(guest, model)) == seen[0]
    assert len(set(seen)) == len(seen)
    assert digest(of(guest, model, environment={"EDITOR": "vi"})) == seen[0], "what has no part in it does not count"


def test_another_version_of_anything_installed_is_another_fact(tmp_path: Path) -> None:
    for name in ("torch-2.13.0.dist-info", "transformers-5.23.0.dist-info", "not_one"):
        (tmp_path / name).mkdir()
    before = installed([str(tmp_path), "/absent"])
    assert before == ["torch-2.13.0.dist-info", "transformers-5.23.0.dist-info"]
    (tmp_path / "torch-2.13.0.dist-info").rename(tmp_path / "torch-2.13.1.dist-info")
    assert installed([str(tmp_path)]) != before
    (tmp_path / "kernels-1.0.dist-info").mkdir()
    assert len(installed([str(tmp_path)])) == 3


def test_every_source_file_of_ours_counts_byte_for_byte(tmp_path: Path) -> None:
    with pytest.raises(Unsettled, match="no source files"):
        source_digest(tmp_path)
    (tmp_path / "a.py").write_text("a = 1\n")
    (tmp_path / "below").mkdir()
    (tmp_path / "below/b.cpp").write_text("int b;\n")
    (tmp_path / "below/b.h").write_text("int b;\n")
    seen = [source_digest(tmp_path)]
    (tmp_path / "a.py").write_text("a = 2\n")
    seen.append(source_digest(tmp_path))
    (tmp_path / "below/b.cpp").rename(tmp_path / "below/c.cpp")
    seen.append(source_digest(tmp_path))
    (tmp_path / "below/b.h").write_text("long b;\n")
    seen.append(source_digest(tmp_path))
    (tmp_path / "d.py").touch()
    seen.append(source_digest(tmp_path))
    assert len(set(seen)) == len(seen)


def test_files_that_were_written_anew_or_replaced_are_others(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"abcd")
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    before = identities(tmp_path, LONG_SINCE)
    assert identities(tmp_path, LONG_SINCE) == before
    time.sleep(0.05)  # more than the grain of a file system's clock
    file.write_bytes(b"dcba")
    os.utime(file, ns=times)  # the size and the time of writing are the same again; the time of change cannot be set
    changed = identities(tmp_path, LONG_SINCE)
    assert changed != before
    (tmp_path / "other").write_bytes(b"dcba")
    (tmp_path / "other").rename(file)
    assert identities(tmp_path, LONG_SINCE) not in (before, changed)


def test_files_that_may_have_changed_since_they_were_read_are_not_relied_on(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"abcd")
    with pytest.raises(Unsettled, match="has just changed"):
        identities(tmp_path, time.time_ns())


def test_nothing_is_kept_of_a_network_that_the_caller_built(tmp_path: Path) -> None:
    how = {"began": LONG_SINCE, "limits": LIMITS, "environment": {"XDG_CACHE_HOME": str(tmp_path)}}
    measures_of(llama(), None, **how).keep()
    assert list(tmp_path.iterdir()) == []


# -- starts -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The cache directory of a machine on which models that were just written count as old."""
    monkeypatch.setattr(facts, "SETTLED", -(10**15))
    own_cache(monkeypatch, tmp_path / "cache")
    return tmp_path / "cache/kvcellar"


def started(path: Path, **how: Any) -> tuple[str, int]:
    """The capacity that a start comes to, and how many steps were tried for it."""
    tried = mock.Mock(side_effect=reserve._tried)
    budget = {"threads": 1, "cache_bytes": 40_000_000, "attention": "sdpa", "pack": False, **how}
    with mock.patch.object(reserve, "_tried", tried), Engine(path, **budget) as engine:
        return str(engine.capacity()), tried.call_count


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("llama", {}),
        ("llama", {"kv_dtype": "k=int8+hadamard,v=int4"}),
        ("gemma3", {"context": 40}),
        ("mamba2", {}),
        *(pytest.param(name, {}, marks=pytest.mark.slow) for name in ("lfm3", "gpt-oss", "bloom")),
    ],
)
def test_the_second_start_measures_nothing_and_comes_to_the_same(settled, tmp_path, name, how) -> None:
    path = tmp_path / "model"
    ARCHS[name].build().save_pretrained(path)
    first, tried = started(path, **how)
    assert tried >= 2
    assert started(path, **how) == (first, 0)
    for file in [*settled.glob("steps/*"), *settled.glob("starts/*")]:
        file.unlink()
    assert started(path, **how) == (first, tried), "measured afresh it is the same"


def test_other_settings_and_other_weights_are_measured_anew(settled, tmp_path, model) -> None:
    assert started(model)[1] > 0
    for how in ({"context": 50}, {"step_tokens": 100}, {"max_sequences": 3}, {"attention": "reference"}):
        assert started(model, **how)[1] > 0, how
    assert started(model)[1] == 0
    (model / "model.safetensors").touch()
    assert started(model)[1] > 0


def test_a_start_goes_on_without_a_cache_and_with_a_damaged_one(settled, tmp_path, model, monkeypatch) -> None:
    # What was recorded before in this process needs less memory when it is measured again.
    first, _ = started(model, record="off")
    for file in settled.glob("steps/*"):
        file.write_bytes(file.read_bytes()[:-9])
    again, tried = started(model, record="off")
    assert again == first
    assert tried > 0
    assert started(model, record="off") == (first, 0), "the damaged file was replaced"
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    again, tried = started(model, record="off")
    assert again.partition(";")[0] == first.partition(";")[0], "the rest is what draws take, which are not compiled"
    assert tried > 0
