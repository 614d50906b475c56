"""One store, several processes: each reads what the others stored, and together they keep to the cap."""

import os
import random
import traceback
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from tests.tiers.made import content, made, store
from tests.tiers.test_disk import tmp_path  # noqa: F401  # pytest finds it by name


def in_children(*bodies: Callable[[], None]) -> None:
    """Run each in a process of its own, at the same time. Raises if one raised."""
    children = []
    for body in bodies:
        child = os.fork()
        if not child:  # nothing of pytest may run here
            try:
                body()
            except BaseException:  # noqa: BLE001 - printed, and seen as the exit status
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    assert all(os.waitpid(child, 0)[1] == 0 for child in children), "a process failed: its traceback is above"


def used(directory: Path) -> int:
    """Bytes of all files, as far as they are there while others work."""
    total = 0
    for path in directory.rglob("*"):
        with suppress(OSError):
            total += path.stat().st_size if path.is_file() else 0
    return total


def test_what_one_process_stores_another_reads(tmp_path) -> None:  # noqa: F811
    first, second = made(1), made(2)

    def writes() -> None:
        with closing(store(tmp_path)) as opened:
            assert opened.put(*first)

    in_children(writes)
    with closing(store(tmp_path)) as opened:
        in_children(writes)  # beside this one, which must not delete what the other writes
        assert content(opened, first[0].key) == first
        assert opened.put(*second)


def test_processes_together_keep_to_the_cap_and_read_no_wrong_byte(tmp_path) -> None:  # noqa: F811
    cap = 100_000

    def plays(seed: int) -> Callable[[], None]:
        def play() -> None:
            rng = random.Random(seed)
            with closing(store(tmp_path, max_bytes=cap)) as opened:
                for _ in range(40):
                    one = made(rng.randrange(30), size=600)
                    if rng.random() < 0.5:
                        opened.put(*one)
                    else:
                        assert content(opened, one[0].key) in (None, one)
                    if rng.random() < 0.1:
                        opened.remove([one[0].key])
                    assert opened.size() <= cap
                    assert used(tmp_path) <= cap
                assert not opened.failures["damaged"]

        return play

    in_children(*(plays(seed) for seed in range(3)))
    with closing(store(tmp_path)) as opened:
        for stored in opened.entries():
            assert content(opened, stored.snapshot.key) is not None
        assert {path.name for path in (tmp_path / "data").iterdir()} == opened._index.names()
        assert not list((tmp_path / "temporary").iterdir())


def test_files_of_a_process_that_lives_are_left_alone(tmp_path) -> None:  # noqa: F811
    with closing(store(tmp_path)) as opened:
        (tmp_path / "temporary" / f"{opened._process}-9").write_bytes(b"half")
        (tmp_path / "temporary" / "0123456789abcdef-9").write_bytes(b"of a process that is gone")
        store(tmp_path).close()
        assert [path.name for path in (tmp_path / "temporary").iterdir()] == [f"{opened._process}-9"]
