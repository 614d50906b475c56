"""Keys of gateways: each reads a file again that has changed."""

import asyncio
import os
from pathlib import Path

import pytest

from kvcellar.cluster import node_files
from kvcellar.cluster.node_files import KeyFiles, follow
from kvcellar.serve.http.key_ring import KeyRing
from kvcellar.serve.http.keys import read_keys
from kvcellar.serve.settings import ServeSettings, key_digest

OLD, NEW, GIVEN = "key-number-one-of-a-client", "key-number-two-of-a-client", "key-that-all-were-given"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "keys.txt"
    file.write_text(f"# name: ann\n# weight: 2\n{OLD}\n")
    return file


def gateway_keys(file: Path) -> tuple[KeyFiles, KeyRing]:
    files = KeyFiles([str(file), None, None], read_keys(None, None, None, {"KVCELLAR_API_KEY": GIVEN}))
    return files, KeyRing(ServeSettings(**files.read().fields()), files.read)


def known(ring: KeyRing) -> set[bytes]:
    return set(ring.now.api)


def digests(*keys: str) -> set[bytes]:
    return set(map(key_digest, keys))


def follows(*gateways: tuple[KeyFiles, KeyRing]) -> None:
    """All gateways look once."""

    async def look() -> None:
        tasks = [asyncio.create_task(follow(*one)) for one in gateways]
        while any(files.changed for files, _ in gateways):
            await asyncio.sleep(0.01)
        for _ in range(3):  # what was begun is done
            await asyncio.sleep(0.02)
        for task in tasks:
            task.cancel()

    asyncio.run(look())


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_files, "LOOK_SECONDS", 0.01)


def test_two_gateways_take_a_file_that_has_changed(file: Path) -> None:
    gateways = [gateway_keys(file) for _ in range(2)]
    for _, ring in gateways:
        assert known(ring) == digests(OLD, GIVEN)
        assert ring.now.weights[key_digest(OLD)] == 2.0
    file.write_text(f"{NEW}\n")
    follows(*gateways)
    assert [known(ring) for _, ring in gateways] == [digests(NEW, GIVEN)] * 2


def test_a_file_in_another_place_of_a_link_is_another_one(file: Path, tmp_path: Path) -> None:
    """As Kubernetes changes a Secret: size and time may be the same."""
    link, other = tmp_path / "link", tmp_path / "other.txt"
    other.write_text(file.read_text().replace(OLD, NEW))
    about = file.stat()
    os.utime(other, ns=(about.st_atime_ns, about.st_mtime_ns))
    link.symlink_to(file)
    one = gateway_keys(link)
    assert not one[0].changed
    link.unlink()
    link.symlink_to(other)
    follows(one)
    assert known(one[1]) == digests(NEW, GIVEN)


@pytest.mark.parametrize("wrong", ["", "a key", None])
def test_a_file_that_is_wrong_changes_nothing(file: Path, wrong: str | None) -> None:
    one = gateway_keys(file)
    if wrong is None:
        file.unlink()
    else:
        file.write_text(wrong)
    follows(one)
    assert known(one[1]) == digests(OLD, GIVEN)
    file.write_text(f"{NEW}\n")
    follows(one)
    assert known(one[1]) == digests(NEW, GIVEN)
