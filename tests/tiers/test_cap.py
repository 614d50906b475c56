"""The cap of the store on disk holds at every moment, and counts every byte in the directory."""

import os
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvcellar.memory.retention import Retention
from kvcellar.memory.tiers.disk import DiskTier
from kvcellar.memory.tiers.upkeep import verified
from tests.tiers.faults import COUNTED, Counting
from tests.tiers.made import IDENTITY, chains, content, made, store
from tests.tiers.test_disk import tmp_path  # noqa: F401  # pytest finds it by name

PUTS = 60


def bytes_in(directory: Path) -> int:
    """Of all files, as far as they are there."""
    total = 0
    for path, _, names in os.walk(directory):
        for name in names:
            with suppress(FileNotFoundError):
                total += os.lstat(f"{path}/{name}").st_size
    return total


class Sampled(DiskTier):
    """Samples the bytes in its directory before and after each file operation, and in the middle of each transaction
    of the index."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.most, self.sampled, self._sampled_directory = 0, 0, directory
        super().__init__(directory, **options)
        self._index._connection.set_progress_handler(self.sample, 50)
        for name in COUNTED:
            setattr(self._files, name, self._around(getattr(self._files, name)))

    def sample(self) -> int:
        self.most, self.sampled = max(self.most, bytes_in(self._sampled_directory)), self.sampled + 1
        return 0

    def _around(self, act: Any) -> Any:
        def sampled(*arguments: Any) -> Any:
            self.sample()
            try:
                return act(*arguments)
            finally:
                self.sample()

        return sampled


def play(directory: Path, seed: int, cap: int) -> int:
    """Random operations on a store, which is opened again now and then; returns how many samples were taken."""
    rng, now, sampled = random.Random(seed), [0.0], 0
    stored = [made(0, size=1000)]

    def opened() -> Sampled:
        return Sampled(directory, identity=IDENTITY, max_bytes=cap, share_of_free=1.0, clock=lambda: now[0])

    tier = opened()
    for step in range(PUTS):
        parent = rng.choice(stored)[0] if rng.random() < 0.5 else None
        one = made(
            rng.randrange(10**6), parent, tokens=rng.choice((3, 200, 900)), size=rng.choice((500, 12_000, 40_000))
        )
        expires = now[0] + 20 if rng.random() < 0.2 else None
        tier.put(*one, Retention(priority=rng.choice((-1, 0, 2)), pinned=rng.random() < 0.03, expires=expires))
        stored.append(one)
        found = rng.choice(stored)
        assert content(tier, found[0].key) in (None, found)
        now[0] += 1
        match rng.randrange(8):
            case 0:
                tier.remove([rng.choice(stored)[0].key])
            case 1:
                tier.used([entry.snapshot.key for entry in tier.entries()][:5])
            case 2:  # damage a file, and read it
                for path in sorted((directory / "data").iterdir())[:1]:
                    whole = path.read_bytes()
                    path.write_bytes(whole[:-20] + bytes([whole[-20] ^ 1]) + whole[-19:])
                verified(tier)
            case 3 if step % 3 == 0:
                tier.close()
                if rng.random() < 0.5:
                    (directory / "index.sqlite").unlink()
                assert bytes_in(directory) <= cap
                sampled += tier.sampled
                assert tier.most <= cap
                tier = opened()
        assert bytes_in(directory) <= cap
        assert bytes_in(directory) <= tier.size() <= cap
    tier.close()
    assert cap // 2 < tier.most <= cap
    return sampled + tier.sampled


@pytest.mark.parametrize("seed", range(6))
def test_the_cap_holds_at_a_tenth_of_what_is_put(tmp_path, seed) -> None:  # noqa: F811
    assert play(tmp_path, seed, cap=180_000) > 1000


class Watched(Counting):
    """Samples the bytes in a directory before each file operation."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._directory, self.most = directory, 0

    def at(self, number: int, name: str, arguments: tuple) -> None:
        self.most = max(self.most, bytes_in(self._directory))


def test_an_index_that_is_made_again_leaves_out_what_is_over_the_cap(tmp_path) -> None:  # noqa: F811
    chain = [made(0, size=2000)]
    for seed in range(1, 100):
        chain.append(made(seed, chain[-1][0], size=2000))
    opened = store(tmp_path)
    for one in reversed(chain):
        assert opened.put(*one)
    opened.close()
    (tmp_path / "index.sqlite").unlink()
    cap = bytes_in(tmp_path) + 36_000  # at least as much as an index without entries and its journal
    files = Watched(tmp_path)
    opened = store(tmp_path, max_bytes=cap, files=files)
    assert files.most <= cap
    found = [entry.snapshot for entry in chains(opened.entries())]
    assert 60 < len(found) < 100
    assert found == [snapshot for snapshot, _ in chain[: len(found)]], "a parent was left out before its children"
    assert bytes_in(tmp_path) <= opened.size() <= cap
    opened.close()


def test_sqlite_gets_no_pages_over_the_cap_even_where_too_few_were_reserved(tmp_path, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr("kvcellar.memory.tiers.disk.growth", lambda meta: 0)
    opened = store(tmp_path, max_bytes=160_000)
    stored = [opened.put(*made(seed, tokens=3000, size=30)) for seed in range(8)]
    assert True in stored
    assert False in stored
    assert bytes_in(tmp_path) <= opened.size() <= 160_000
    assert {path.name for path in (tmp_path / "data").iterdir()} == opened._index.names()
