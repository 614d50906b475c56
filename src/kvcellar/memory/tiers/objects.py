"""objects: named byte strings in a store elsewhere, by the clients of Valkey and Redis, and by fsspec; and buckets of
names beside them, by which they are found (see `buckets`). Only `names` and `tidy` cost more where there are more.

Every call ends within a time, and raises `RemoteFailed` for whatever the store or its client does.
"""

# pyright: standard
# (fsspec has no types, and those of redis are partial)

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from kvcellar.errors import BadRequest, extra_missing
from kvcellar.memory.snapshot import KEY
from kvcellar.memory.tiers.bounded import Bounded, RemoteFailed
from kvcellar.memory.tiers.buckets import LONGEST
from kvcellar.places import make_private

T = TypeVar("T")
log = logging.getLogger("kvcellar.memory.tiers")

SCANNED = 500  # names for each call of a listing or deletion
MOST_MEMBERS = 1024  # of a bucket that are read
LASTS = 30 * 86400  # seconds until Valkey or Redis deletes an object that was written, or a bucket that was added to
EVICTS = "it may evict conversations and what is counted of them; set volatile-lru, or noeviction"
TIDIED = 3600.0  # seconds between two times that one of the processes that share a directory deletes files


# KEYS: bucket. ARGV: name, most names, seconds until it is deleted
_ADD = """
if redis.call('TYPE', KEYS[1]).ok ~= 'zset' then redis.call('DEL', KEYS[1]) end
local now = redis.call('TIME')
redis.call('ZADD', KEYS[1], now[1] * 1000000 + now[2], ARGV[1])
redis.call('ZREMRANGEBYRANK', KEYS[1], 0, -ARGV[2] - 1)
redis.call('EXPIRE', KEYS[1], ARGV[3])
"""
# KEYS: bucket. ARGV: most names, and characters of each
_MEMBERS = """
local found = {}
if redis.call('TYPE', KEYS[1]).ok == 'zset' then
  for _, name in ipairs(redis.call('ZRANGE', KEYS[1], -ARGV[1], -1)) do
    if #name <= tonumber(ARGV[2]) then found[#found + 1] = name end
  end
end
return found
"""


Found = tuple[bytes, int] | None  # the first bytes of an object, and how many it has; None if it is not there, or empty


def open_objects(url: str, prefix: str) -> "Objects":
    """The store at a URL: a Valkey or Redis server, or what fsspec finds there. Raises what the classes below raise."""
    if (server := server_url(url)) is not None:
        return RedisObjects(server, prefix)
    return DirectoryObjects(url, prefix) if url.startswith(("file:", "local:")) else FsspecObjects(url, prefix)


def server_url(url: str) -> str | None:
    """As `redis` has it; None: it is not that of a Valkey or Redis server."""
    scheme, _, rest = url.partition("://")
    scheme = {"valkey": "redis", "valkeys": "rediss"}.get(scheme, scheme)
    return f"{scheme}://{rest}" if scheme in ("redis", "rediss", "unix") else None


@contextmanager
def opening(url: str) -> Generator[None]:
    """What is raised for a URL becomes a `BadRequest`, without the text of an error that may have a password."""
    try:
        yield
    except ImportError as error:
        raise BadRequest(extra_missing("store_remote", "remote", error), "store_remote") from error
    except ValueError as error:
        why = type(error).__name__ if "@" in url else str(error)
        raise BadRequest(f"store_remote cannot be opened: {why}", "store_remote") from None


class RedisServer:
    """A client of a Valkey or Redis server."""

    def __init__(self, url: str, timeout: float) -> None:
        """`url` such as redis://host:6379/0, rediss:// or unix://path; `timeout` in seconds to connect, and for each
        part that is sent or received. Calls nothing yet. Raises `ImportError` where `redis` is not installed,
        `ValueError` for another URL."""
        from redis import Redis, RedisError, ResponseError
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        limits = {"socket_timeout": timeout, "socket_connect_timeout": timeout}
        self._errors, self._refused = (RedisError, OSError, ValueError), ResponseError
        self.client: Any = Redis.from_url(url, retry=Retry(NoBackoff(), 0), **limits)

    @contextmanager
    def calls(self) -> Generator[None]:
        """What fails in the block raises `RemoteFailed`."""
        try:
            yield
        except self._errors as error:
            raise failed(error, answers=isinstance(error, self._refused)) from error


def failed(error: Exception, *, answers: bool = False) -> RemoteFailed:
    return RemoteFailed(f"the store elsewhere has failed: {type(error).__name__}", answers=answers)


class RedisObjects:
    """Objects by name, of letters and digits: strings of a Valkey or Redis server, which may evict them by itself."""

    def __init__(self, url: str, prefix: str, *, timeout: float = 2.0) -> None:
        """As `RedisServer`."""
        server = RedisServer(url, timeout)
        self._prefix, self._unchecked = prefix, True
        self._redis, self._failing = server.client, server.calls
        self._adding, self._listing = map(self._redis.register_script, (_ADD, _MEMBERS))

    def read(self, names: Sequence[str], n: int) -> list[Found]:
        """The first `n` bytes of each."""
        with self._failing(), self._redis.pipeline(transaction=True) as together:  # else one is written in between
            for name in names:
                together.getrange(self._prefix + name, 0, n - 1)
                together.strlen(self._prefix + name)
            found = together.execute()
        return [one if one[1] else None for one in zip(found[::2], found[1::2], strict=True)]

    def write(self, name: str, content: bytes, seconds: float | None) -> None:
        """Replace an object; the store may delete it after so many seconds, or `LASTS`. Readers find all of one
        content."""
        milliseconds = max(1, int(1000 * min(LASTS if seconds is None else seconds, LASTS)))
        with self._failing():
            self._redis.set(self._prefix + name, content, px=milliseconds)

    def delete(self, names: Sequence[str]) -> None:
        """Whether they are there or not."""
        with self._failing():
            for at in range(0, len(names), SCANNED):
                self._redis.unlink(*(self._prefix + name for name in names[at : at + SCANNED]))

    def names(self, most: int) -> list[str]:
        """Of all objects, or of `most` of them."""
        with self._failing():
            found = islice(self._redis.scan_iter(match=self._prefix + "*", count=SCANNED), most)
            return [name.decode(errors="replace").removeprefix(self._prefix) for name in found]

    def _bucket(self, name: str) -> str:
        """A sorted set, by the time of the server at which names were added."""
        return f"bucket-{self._prefix}{name}"

    def add(self, bucket: str, member: str) -> None:
        """Add a name to a bucket, or make it the newest one there."""
        with self._failing():
            self._adding([self._bucket(bucket)], [member, MOST_MEMBERS, LASTS])

    def members(self, buckets: Sequence[str]) -> list[list[str]]:
        """The names in each bucket, up to `MOST_MEMBERS` of them, the newest where the store has an order."""
        with self._failing(), self._redis.pipeline(transaction=False) as together:
            for bucket in buckets:
                self._listing([self._bucket(bucket)], [MOST_MEMBERS, LONGEST], together)
            return [[member.decode(errors="replace") for member in found] for found in together.execute()]

    def strike(self, listed: Sequence[tuple[str, str]]) -> None:
        """Remove names from their buckets."""
        with self._failing(), self._redis.pipeline(transaction=False) as together:
            for bucket, member in listed:
                together.zrem(self._bucket(bucket), member)
            together.execute(raise_on_error=False)

    def tidy(self, most: int) -> None:
        """Where nothing else bounds what all processes store: delete what was read longest ago, until `most` bytes are
        left, at most once in `TIDIED` seconds. The server has a bound and an order of its own: `maxmemory` and its
        policy, which is looked at once."""
        if self._unchecked:
            self._unchecked = False
            with suppress(RemoteFailed), self._failing():  # some servers do not tell
                policy = self._redis.config_get("maxmemory-policy").get("maxmemory-policy", "")
                if policy.startswith("allkeys"):
                    log.warning("the remote store has the maxmemory-policy %s: %s", policy, EVICTS)

    def close(self) -> None:
        with self._failing():
            self._redis.close()


class FsspecObjects:
    """Files of a directory or bucket that fsspec reads and writes, with the methods of `RedisObjects`."""

    def __init__(self, url: str, prefix: str, *, timeout: float = 30.0, **options: Any) -> None:
        """`url` such as file:///path, s3://bucket/path or memory://path, with the options of its file system; `timeout`
        in seconds for each call. A directory is made private to this user. Raises `ImportError` where `fsspec` or the
        file system's package is not installed, `ValueError` for another URL, and `RemoteFailed`."""
        from fsspec.core import url_to_fs
        from fsspec.implementations.local import LocalFileSystem

        files: Any
        files, root = url_to_fs(url, **options)
        self._files, self._root, self._bounded = files, f"{root.rstrip('/')}/{prefix}", Bounded(timeout)
        if isinstance(files, LocalFileSystem):
            self._within(lambda: make_private(Path(self._root)))
        else:
            self._within(lambda: files.makedirs(self._root, exist_ok=True))

    def _within(self, act: Callable[[], T]) -> T:
        try:
            return self._bounded(act)
        except RemoteFailed:
            raise
        except Exception as error:  # file systems raise what the packages that they use raise
            raise failed(error) from error

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read(self, names: Sequence[str], n: int) -> list[Found]:
        return self._within(lambda: [self._read(name, n) for name in names])

    def _read(self, name: str, n: int) -> Found:
        try:
            found = bytes(self._files.cat_file(self._path(name), start=0, end=n))
            self._files.invalidate_cache(self._root)
            return (found, len(found) if len(found) < n else self._files.size(self._path(name))) if found else None
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes, seconds: float | None) -> None:
        self._within(lambda: self._write(self._path(name), content))

    def _write(self, path: str, content: bytes) -> None:
        self._files.pipe_file(path, content)

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._within(lambda name=name: self._delete(self._path(name)))

    def _delete(self, path: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(path)

    def names(self, most: int) -> list[str]:
        return self._within(lambda: self._names(most))

    def _names(self, most: int) -> list[str]:
        self._files.invalidate_cache(self._root)
        try:
            found = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            return []
        return [one["name"].rpartition("/")[2] for one in islice((one for one in found if one["type"] == "file"), most)]

    def _bucket(self, name: str) -> str:
        """A directory with an empty file for each name."""
        return self._path(f"buckets/{name}")

    def add(self, bucket: str, member: str) -> None:
        self._within(lambda: self._add(self._bucket(bucket), member))

    def _add(self, directory: str, member: str) -> None:
        self._files.makedirs(directory, exist_ok=True)
        self._files.pipe_file(f"{directory}/{member}", b"")

    def members(self, buckets: Sequence[str]) -> list[list[str]]:
        return self._within(lambda: [self._members(self._bucket(bucket)) for bucket in buckets])

    def _members(self, directory: str) -> list[str]:
        self._files.invalidate_cache(directory)
        with suppress(FileNotFoundError):
            return [path.rpartition("/")[2] for path in self._files.ls(directory, detail=False)[:MOST_MEMBERS]]
        return []

    def strike(self, listed: Sequence[tuple[str, str]]) -> None:
        for bucket, member in listed:
            path = f"{self._bucket(bucket)}/{member}"
            self._within(lambda path=path: self._delete(path))

    def tidy(self, most: int) -> None:
        """Object stores delete what is old by rules of their own."""

    def close(self) -> None:
        """Its file system is shared with all others of the same options, by fsspec: it stays."""


Objects = RedisObjects | FsspecObjects


class DirectoryObjects(FsspecObjects):
    """Files of a directory, which other processes and machines may share. When a file was read last is its time."""

    tidying: threading.Thread | None = None  # that has begun last

    def _read(self, name: str, n: int) -> Found:
        with suppress(FileNotFoundError, PermissionError):  # what another user has stored is read all the same
            os.utime(self._path(name))
        return super()._read(name, n)

    def _write(self, path: str, content: bytes) -> None:
        part = f"{path}.{secrets.token_hex(4)}"
        try:
            super()._write(part, content)
            os.replace(part, path)
        except BaseException:
            self._delete(part)
            raise

    def _members(self, directory: str) -> list[str]:
        with suppress(FileNotFoundError), os.scandir(directory) as found:
            return [one.name for one in islice(found, MOST_MEMBERS)]
        return []

    def tidy(self, most: int) -> None:
        """In a thread of its own: it may take as long as listing all files does."""
        if self._within(self._untidy):
            self.tidying = threading.Thread(target=self._tidy, args=(most,), name="kvcellar-tidy", daemon=True)
            self.tidying.start()

    def _untidy(self) -> bool:
        """Whether it is time. The time of the file is when a process has begun last."""
        mark = Path(f"{self._root}.tidied")
        if mark.exists() and mark.stat().st_mtime > time.time() - TIDIED:
            return False
        mark.touch()
        return True

    def _tidy(self, most: int) -> None:
        try:
            self._delete_old(most, time.time() - TIDIED)
        except OSError as error:
            log.warning("old files of the remote store are not deleted: %s", error)

    def _delete_old(self, most: int, old: float) -> None:
        files = sorted(_files(Path(self._root)))
        left, kept = sum(size for _, size, _ in files), set[str]()
        for read, size, name in files:
            if left > most or ("." in name and read < old):  # or what was not written to its end
                self._delete(self._path(name))
                left -= size
            else:
                kept.add(name)
        for bucket in Path(self._path("buckets")).glob("*"):
            for made, _, name in _files(bucket):
                if name[: 2 * KEY] not in kept and made < old:  # nor of what is new
                    self._delete(str(bucket / name))
            with suppress(OSError):  # it has others
                bucket.rmdir()


def _files(directory: Path) -> Iterator[tuple[float, int, str]]:
    """The time, size and name of all files in a directory."""
    for one in directory.iterdir():
        with suppress(FileNotFoundError):
            if one.is_file():
                yield one.stat().st_mtime, one.stat().st_size, one.name
