"""Where documents can be kept, for tests of what is done with them: in memory, in a directory, in a real server.
Fixtures of a folder are named in its `conftest.py`.
"""

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from kvcellar.frontend.documents import Documents
from kvcellar.memory.tiers.archive import Archive, DiskArchive
from kvcellar.memory.tiers.remote_archive import RedisArchive
from tests.tiers.redis_server import BINARY, RedisServer

needs_server = pytest.mark.skipif(BINARY is None, reason="neither valkey-server nor redis-server is installed")
SHARED = ["disk", pytest.param("redis", marks=needs_server)]
Make = Callable[..., Archive]  # of the cap, and options


@pytest.fixture(scope="module")
def server_url() -> Iterator[str]:
    pytest.importorskip("redis", reason="the extra `remote` is not installed")
    with tempfile.TemporaryDirectory() as directory:  # paths of sockets are short
        server = RedisServer(Path(directory))
        server.start()
        yield server.url
        server.kill()


@pytest.fixture(params=["memory", *SHARED])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Make:
    if request.param == "memory":
        return Archive
    if request.param == "disk":
        return partial(DiskArchive, tmp_path / "documents")
    return partial(RedisArchive, request.getfixturevalue("server_url"), f"{tmp_path}-")


@pytest.fixture(params=SHARED)
def documents(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Documents]:
    """A place that outlives front ends, empty."""
    if request.param == "disk":
        yield Documents(directory=tmp_path)
        return
    from redis import Redis

    url = request.getfixturevalue("server_url")
    yield Documents(server=url)
    Redis.from_url(url).flushall()
