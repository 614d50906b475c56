"""objects: named byte strings in a store elsewhere, by the clients of Valkey and Redis, and by fsspec.

Every call ends within a time, and raises `RemoteFailed` for whatever the store or its client does.
"""

# pyright: standard
# (fsspec has no types, and those of redis are partial)

import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

from kvcellar.places import make_private

T = TypeVar("T")
SCANNED = 500  # names for each call of a listing


class RemoteFailed(Exception):
    """A call to a store elsewhere has failed."""


class Objects(Protocol):
    """Objects by name. Names are of letters and digits."""

    def read(self, name: str, n: int) -> bytes | None:
        """The first `n` bytes, fewer at the end; None if there is no such object."""
        ...

    def write(self, name: str, content: bytes, seconds: float | None) -> None:
        """Replace an object; the store may delete it after so many seconds."""
        ...

    def delete(self, names: Sequence[str]) -> None:
        """Whether they are there or not."""
        ...

    def sizes(self, most: int) -> dict[str, int]:
        """The bytes of all objects, or of `most` of them."""
        ...

    def close(self) -> None: ...


def open_objects(url: str, prefix: str) -> Objects:
    """The store at a URL: a Valkey or Redis server, or what fsspec finds there. Raises what the classes below raise."""
    scheme, _, rest = url.partition("://")
    scheme = {"valkey": "redis", "valkeys": "rediss"}.get(scheme, scheme)
    if scheme in ("redis", "rediss", "unix"):
        return RedisObjects(f"{scheme}://{rest}", prefix)
    return FsspecObjects(url, prefix)


class RedisObjects:
    """Strings of a Valkey or Redis server, which may evict them by itself."""

    def __init__(self, url: str, prefix: str, *, timeout: float = 2.0) -> None:
        """`url` such as redis://host:6379/0, rediss:// or unix://path; `timeout` in seconds to connect, and for each
        part that is sent or received. Raises `ImportError` where `redis` is not installed, `ValueError` for another
        URL."""
        from redis import Redis, RedisError
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        self._prefix, self._errors = prefix, (RedisError, OSError)
        self._redis: Any = Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0)
        )

    @contextmanager
    def _failing(self) -> Generator[None]:
        try:
            yield
        except self._errors as error:
            raise RemoteFailed(f"{type(error).__name__}: {error}") from error

    def read(self, name: str, n: int) -> bytes | None:
        with self._failing():
            found = self._redis.getrange(self._prefix + name, 0, n - 1)
            return found if found or self._redis.exists(self._prefix + name) else None

    def write(self, name: str, content: bytes, seconds: float | None) -> None:
        milliseconds = None if seconds is None else max(1, int(1000 * seconds))
        with self._failing():
            self._redis.set(self._prefix + name, content, px=milliseconds)

    def delete(self, names: Sequence[str]) -> None:
        with self._failing():
            for some in _batches(names):
                self._redis.unlink(*(self._prefix + name for name in some))

    def sizes(self, most: int) -> dict[str, int]:
        found: dict[str, int] = {}
        with self._failing():
            for some in _batches(islice(self._redis.scan_iter(match=self._prefix + "*", count=SCANNED), most)):
                with self._redis.pipeline(transaction=False) as together:
                    for name in some:
                        together.strlen(name)
                    sizes = together.execute(raise_on_error=False)
                names = (name.decode(errors="replace").removeprefix(self._prefix) for name in some)
                found |= {name: size for name, size in zip(names, sizes, strict=True) if isinstance(size, int)}
        return found

    def close(self) -> None:
        with self._failing():
            self._redis.close()


class FsspecObjects:
    """Files of a directory or bucket that fsspec reads and writes."""

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
            self._bounded(lambda: make_private(Path(self._root)))
        else:
            self._bounded(lambda: files.makedirs(self._root, exist_ok=True))

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def read(self, name: str, n: int) -> bytes | None:
        return self._bounded(lambda: self._read(name, n))

    def _read(self, name: str, n: int) -> bytes | None:
        try:
            return bytes(self._files.cat_file(self._path(name), start=0, end=n))
        except FileNotFoundError:
            return None

    def write(self, name: str, content: bytes, seconds: float | None) -> None:
        self._bounded(lambda: self._files.pipe_file(self._path(name), content))

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._bounded(lambda name=name: self._delete(name))

    def _delete(self, name: str) -> None:
        try:
            self._files.rm_file(self._path(name))
        except FileNotFoundError:
            return

    def sizes(self, most: int) -> dict[str, int]:
        return self._bounded(lambda: self._sizes(most))

    def _sizes(self, most: int) -> dict[str, int]:
        self._files.invalidate_cache(self._root)
        try:
            found = self._files.ls(self._root, detail=True)
        except FileNotFoundError:
            return {}
        files = (one for one in found if one["type"] == "file")
        return {one["name"].rpartition("/")[2]: int(one["size"]) for one in islice(files, most)}

    def close(self) -> None:
        """Its file system is shared with all others of the same options, by fsspec: it stays."""


class Bounded:
    """Calls in threads of their own, so that one that hangs ends for its caller."""

    def __init__(self, timeout: float, *, most: int = 4) -> None:
        """`timeout` in seconds; while `most` calls hang, no other is tried."""
        self._timeout, self._free = timeout, threading.Semaphore(most)

    def __call__(self, act: Callable[[], T]) -> T:
        """Raises `RemoteFailed`."""
        if not self._free.acquire(timeout=self._timeout):
            raise RemoteFailed("too many calls hang")
        result: Future[T] = Future()
        threading.Thread(target=self._run, args=(act, result), name="kvcellar-objects", daemon=True).start()
        try:
            return result.result(self._timeout)
        except TimeoutError as error:
            raise RemoteFailed(f"no result within {self._timeout:g} s") from error
        except Exception as error:  # file systems raise what the packages that they use raise
            raise RemoteFailed(f"{type(error).__name__}: {error}") from error

    def _run(self, act: Callable[[], T], result: "Future[T]") -> None:
        try:
            found = act()
        except BaseException as error:  # noqa: BLE001 - raised again in the thread of the caller
            self._free.release()
            result.set_exception(error)
        else:
            self._free.release()
            result.set_result(found)


def _batches(names: Iterable[T]) -> Iterator[tuple[T, ...]]:
    left = iter(names)
    while some := tuple(islice(left, SCANNED)):
        yield some
