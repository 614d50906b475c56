"""An engine that fails to open leaves nothing open, wherever it fails: no thread, socket, file or lock. The next one
opens as if nothing had happened."""

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

from kvcellar import BadRequest, Engine
from kvcellar.engine.core.device import DeviceThread
from kvcellar.engine.load import build, open_store
from kvcellar.engine.models.heads.draft_fit import DraftFit
from kvcellar.memory.store import Store
from kvcellar.memory.tiers.disk import DiskTier
from kvcellar.memory.tiers.objects import FsspecObjects
from kvcellar.memory.tiers.remote import RemoteTier
from kvcellar.memory.tiers.transfers import Transfers
from tests.own_cache import own_cache
from tests.zoo import ARCHS

STEPS = {
    function.__qualname__: function.__code__
    for function in (
        Engine.__init__,
        build._assembled,
        build._speculator,
        build._running,
        open_store.open_store,
        open_store._outside,
        Store.__init__,
        Store.load,
        Transfers.__init__,
        DiskTier.__init__,
        DiskTier._opened_index,
        RemoteTier.__init__,
        FsspecObjects.__init__,
        DeviceThread.add,
    )
}
Line = tuple[CodeType, int]


class Injected(Exception):
    """The failure."""


class InjectedOS(OSError):
    """The failure, of a kind that is handled in places."""


KINDS = (Injected, InjectedOS, KeyboardInterrupt)


@contextmanager
def traced(line: Any) -> Iterator[None]:
    """`line` is called before each line of the steps."""

    def local(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line":
            line((frame.f_code, frame.f_lineno))
        return local

    before = sys.gettrace()
    sys.settrace(lambda frame, event, arg: local if frame.f_code in STEPS.values() else None)
    try:
        yield
    finally:
        sys.settrace(before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("llama")
    ARCHS["llama"].build().save_pretrained(path)
    return path


@pytest.fixture
def directory() -> Iterator[Path]:
    memory = Path("/dev/shm")  # where nothing waits for a disk
    with TemporaryDirectory(dir=memory if memory.is_dir() else None) as made:
        yield Path(made)


@pytest.fixture
def opens(saved, directory, tmp_path, monkeypatch) -> Any:
    """Opens an engine with everything that can be open. Models are loaded and tested once."""
    own_cache(monkeypatch, tmp_path / "cache")
    monkeypatch.setattr(DraftFit, "require", lambda fit: None)  # it is as large as the model
    for name in ("_loaded", "_tested", "_drafts", "measures_of", "divided"):
        once(monkeypatch, name)
    monkeypatch.setattr(open_store, "version", cache(open_store.version))
    pytest.importorskip("fsspec", reason="the extra `remote` is not installed")
    pytest.importorskip("zmq", reason="the extra `events` is not installed")
    settings = {
        "dtype": "float32", "cache_bytes": 8_000_000, "host_bytes": 1_000_000, "max_sequences": 2, "threads": 1,
        "store": str(directory / "store"), "store_remote": f"file://{directory}/remote", "draft": str(saved),
        "kv_events": f"ipc://{directory}/events", "pack": False, "record": "off",
    }  # fmt: skip
    return lambda **changes: Engine(saved, **(settings | changes))


def once(monkeypatch: Any, name: str) -> None:
    make, made = getattr(build, name), list[Any]()

    def kept(*given: Any, **options: Any) -> Any:
        if not made:
            made.append(make(*given, **options))
        return made[0]

    monkeypatch.setattr(build, name, kept)


def files() -> list[str]:
    found: list[str] = []
    for number in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{number}"))
        except FileNotFoundError:  # that of the listing
            continue
    return sorted(found)


class Open(NamedTuple):
    """What is open in the process, of other tests too."""

    files: list[str]
    threads: set[threading.Thread]

    @classmethod
    def now(cls) -> "Open":
        return cls(files(), {thread for thread in threading.enumerate() if thread.name.startswith("kvcellar")})


def assert_nothing_is_open(before: Open, store: Path, where: object) -> None:
    for thread in Open.now().threads - before.threads:
        thread.join(60)  # it has been told to end
        assert not thread.is_alive(), (where, thread.name)
    if files() != before.files:
        gc.collect()
        assert files() == before.files, where
    assert not list((store / "processes").iterdir()), where


@pytest.mark.parametrize("step", STEPS)
def test_a_failure_at_any_line_of_a_step_leaves_nothing_open(opens, directory, step) -> None:
    lines: dict[Line, None] = {}
    begun = False

    def note(line: Line) -> None:
        nonlocal begun
        begun = begun or line[0] is build._speculator.__code__  # nothing is open before
        if begun and line[0] is STEPS[step]:
            lines.setdefault(line)

    opens().close()  # what is made once is there
    with traced(note), opens() as engine:
        assert len(engine.stats().store.tiers) == 3
        assert engine._loop.manager.drafting.memory.store is not None
    del engine
    assert lines
    before = Open.now()
    for at, kind in zip(lines, cycle(KINDS)):
        left = [at]

        def fail(line: Line, left: list[Line] = left, kind: type[BaseException] = kind) -> None:
            if line in left:
                left.clear()
                raise kind("injected")

        try:
            with traced(fail):
                opens().close()
        except KINDS:
            pass
        assert not left, at
        assert_nothing_is_open(before, directory / "store", f"{step}, line {at[1]}: {kind.__name__}")
    with opens() as engine:
        assert engine.generate([5, 6, 7], max_tokens=1).token_ids


@pytest.mark.parametrize("wrong", [{"store_remote": "redis://host:port"}, {"store_remote": "nothing://x"}])
def test_a_setting_that_is_refused_leaves_the_store_free(opens, directory, wrong) -> None:
    opens().close()
    before = Open.now()
    with pytest.raises(BadRequest, match="store_remote"):
        opens(**wrong)
    assert_nothing_is_open(before, directory / "store", wrong)
