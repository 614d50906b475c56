"""archive: documents by owner and name, such as named conversations, in a directory or in memory.

    conversations/<digest of owner>-<digest of name>    a file for each document
    conversations/*.part                                files that are being written
    conversations.lock                                  locked while a document is changed; how many changes were begun,
                                                        and the last ones that were completed: who knows what was before
                                                        them need not list the files

A file is a start (magic, version, and the sizes of both parts), the head, a digest of these, the body, and a digest of
the first digest and the body: the seal. Heads are small, so that documents can be listed without reading bodies. With a
cipher, head and body are sealed, and names depend on a secret. `remote_archive` has the same documents in a server.

An archive that forgets (`Forgets`) drops documents by itself, in the order of their stamps: when each was used, in
microseconds since 1970, which the modification time of a file is. Those who need several documents at once give the one
that is of no use without the others the lowest stamp: it is dropped first.

Always true:
  * a document is replaced as a whole, or not at all; a file is durable before it has its name;
  * what is returned was verified, and its size was checked before it was read;
  * all files together have at most `cap` bytes; one owner has at most a share of them;
  * one owner has at most `MOST` files; in an archive that forgets, all have as many as it says, and none is returned
    that was not used for its seconds.
"""

import os
import secrets
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import Concatenate, NamedTuple, ParamSpec, TypedDict, TypeVar, Unpack

from kvcellar.files import Files, lock_within
from kvcellar.memory.tiers.bounded import Guard
from kvcellar.memory.tiers.codec import (
    DIGEST,
    Cipher,
    Content,
    Damaged,
    Foreign,
    OpenFile,
    Plain,
    Source,
    TooLarge,
    digest,
    write,
)
from kvcellar.places import make_private
from kvcellar.values import UNBOUNDED

P = ParamSpec("P")
T = TypeVar("T")
MOST = 1024  # documents of one owner
LEAST_FILES = 10_000  # most documents of all owners, where documents are dropped, unless more are allowed
HEAD_LIMIT = 64 << 10
BODY_LIMIT = 8 << 20  # bytes of one document
MEMORY_BYTES = 64 << 20
SHARE_OF_FREE = 0.1
WAIT = 10.0  # seconds that a thread waits for another one that writes
BUSY = "another process or thread has been writing for {:g} s"
SLACK = 16  # where documents are dropped, this part of each limit becomes free, so that the next ones fit
PART, LOCK = ".part", ".lock"
_MAGIC, _VERSION = b"kvc-docs", 1
FOLLOWED = 4096  # changes that the lock file has, the last ones; of 10 000 documents 600 are dropped together
_CHANGE = struct.Struct(f"<QQ{4 * DIGEST + 1}s")  # its number, and the file with its new size
_START = struct.Struct("<8sIIQ")
BESIDE_HEAD = _START.size + DIGEST  # bytes before the body


class Full(Exception):
    """The document does not fit. The message has the limit that it exceeds."""


class Changed(Exception):
    """There is another document under that name, or none any more."""


@dataclass(frozen=True, slots=True)
class Document:
    """`seal` identifies the content."""

    head: bytes
    body: bytes
    seal: bytes


@dataclass(frozen=True, slots=True)
class Forgets:
    """What an archive drops by itself: what was not used for so many `seconds`, and what was not used for the longest
    time where something new does not fit: first of its owner, who has at most `own` bytes, then of the owner that has
    the most. All owners together have at most `most` documents. One may be as large as `own`."""

    seconds: float
    own: int
    most: int = LEAST_FILES


class Stored(NamedTuple):
    """A document as it is listed. `used` is its stamp."""

    size: int
    used: int


class Counts(NamedTuple):
    """What there is beside a document: files and bytes of its owner, and files of all owners; and the bytes of all
    files, its own included."""

    own: int
    own_bytes: int
    others: int
    bytes: int


class Sizes:
    """Bytes of files, and by owner the sums of bytes and files; those of all have the owner ""."""

    def __init__(self, files: Iterable[tuple[str, int]] = ()) -> None:
        self.files, self.bytes, self.counts = dict[str, int](), Counter[str](), Counter[str]()
        for file, size in files:
            self.set(file, size)

    def set(self, file: str, size: int) -> None:
        """0: it is not there."""
        before = self.files.pop(file, 0)
        if size:
            self.files[file] = size
        for owner in ("", _owner(file)):
            self.bytes[owner] += size - before
            self.counts[owner] += (size > 0) - (before > 0)
            if not self.counts[owner]:
                del self.bytes[owner], self.counts[owner]

    def beside(self, file: str) -> Counts:
        own, mine = self.files.get(file, 0), _owner(file)
        count = own > 0
        return Counts(self.counts[mine] - count, self.bytes[mine] - own, self.counts[""] - count, self.bytes[""])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sizes) and vars(self) == vars(other)


class ArchiveOptions(TypedDict, total=False):
    seconds: float | None  # that a call takes at most; None: as many as it takes
    share: float  # of the cap: what one owner may have
    forgets: Forgets | None  # None: nothing is dropped
    cipher: Cipher | None
    secret: bytes  # names depend on it
    clock: Callable[[], float]  # seconds since 1970


def file_of(owner: str, name: str, secret: bytes = b"") -> str:
    """The name of the file of a document, that of its owner first."""
    return f"{_hex(owner, secret)}-{_hex(name, secret)}"


def _owner(file: str) -> str:
    """The digest of the owner of a file."""
    return file.partition("-")[0]


def _hex(text: str, secret: bytes = b"") -> str:
    return digest(secret, text.encode()).hex()


def _at(number: int) -> int:
    """Where a change is in the lock file."""
    return 8 + number % FOLLOWED * _CHANGE.size


def _place(file: str, part: str) -> bytes:
    """What a sealed part is authenticated for."""
    return f"{file}.{part}".encode()


def encoded(head: bytes, body: bytes, limit: int) -> bytes:
    """Raises `TooLarge` for a body over the `limit`, and for a head over its own."""
    if len(head) > HEAD_LIMIT or len(body) > limit:
        raise TooLarge(f"it has {len(head) + len(body)} bytes; at most {limit} are allowed")
    start = _START.pack(_MAGIC, _VERSION, len(head), len(body)) + head
    first = digest(start)
    return b"".join((start, first, body, digest(first, body)))


def head_of(source: Source, limit: int) -> tuple[bytes, bytes, int]:
    """The verified head, its digest, and the size of the body. Raises `OSError`, `Damaged` and `Foreign`."""
    start = source.read(_START.size, 0)
    if len(start) != _START.size or not start.startswith(_MAGIC):
        raise Damaged("it does not begin like a document")
    _, version, head, body = _START.unpack(start)
    if version != _VERSION:
        raise Foreign(f"it is of version {version}")
    if head > HEAD_LIMIT or body > limit or source.size != _START.size + head + body + 2 * DIGEST:
        raise Damaged(f"it has {source.size} bytes")
    found = source.read(head + DIGEST, _START.size)
    if found[head:] != digest(start, found[:head]):
        raise Damaged("its head was changed")
    return found[:head], found[head:], body


def document_of(source: Source, limit: int) -> Document:
    """All of it, verified. Raises `OSError`, `Damaged` and `Foreign`."""
    head, first, size = head_of(source, limit)
    found = source.read(size + DIGEST, _START.size + len(head) + DIGEST)
    if found[size:] != digest(first, found[:size]):
        raise Damaged("its body was changed")
    return Document(head, found[:size], found[size:])


def _guarded(method: "Callable[Concatenate[Archive, P], T]") -> "Callable[Concatenate[Archive, P], T]":
    @wraps(method)
    def call(archive: "Archive", *given: P.args, **named: P.kwargs) -> T:
        return archive.within(lambda: method(archive, *given, **named))

    return call


class Archive:
    """Documents in memory: they end with the process. All methods may be called from any thread. They raise
    `OSError`."""

    def __init__(
        self,
        cap: int = MEMORY_BYTES,
        share: float = 1.0,
        *,
        seconds: float | None = None,
        forgets: Forgets | None = None,
        cipher: Cipher | None = None,
        secret: bytes = b"",
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`share` of the `cap` on bytes: what one owner may have."""
        self._cap, self._share, self._forgets = cap, share, forgets
        self._guard, self._lists = (None, None) if seconds is None else (Guard(seconds), Guard(seconds))
        self._cipher, self._secret, self._clock = cipher or Plain(), secret, clock
        self._contents, self._used = dict[str, bytes](), dict[str, int]()
        self._sizes, self._lock = Sizes(), Lock()

    def within(self, act: Callable[[], T], *, lists: bool = False) -> T:
        """What a call returns, if that is in time. One that `lists` documents may be slow because there are many, so
        that one which is late holds up such calls only. Raises `OSError`, too."""
        guard = self._lists if lists else self._guard
        return act() if guard is None else guard(act)

    @property
    def stamp(self) -> int:
        """Of what is used now."""
        return int(self._clock() * 1e6)

    @_guarded
    def get(self, owner: str, name: str) -> Document | None:
        """Raises `Damaged` and `Foreign`."""
        file = file_of(owner, name, self._secret)
        with self._opened(file) as source:
            if source is None:
                return None
            found = document_of(source, self._longest)
        parts = ((found.head, "head"), (found.body, "body"))
        head, body = (bytes(self._cipher.unseal(part, _place(file, what))) for part, what in parts)
        return Document(head, body, found.seal)

    @_guarded
    def put(
        self, owner: str, name: str, head: bytes, body: bytes, *, after: bytes | None = None, used: int | None = None
    ) -> bytes:
        """Store a document, and return its seal. `after`: the seal of the document that it replaces, empty if there is
        to be none; None: whatever is there. `used`: its stamp; None: now. Raises `Full`, `TooLarge` and `Changed`; then
        nothing has changed, but for what was dropped."""
        file = file_of(owner, name, self._secret)
        parts = ((head, "head"), (body, "body"))
        head, body = (bytes(self._cipher.seal(part, _place(file, what))) for part, what in parts)
        content, used = encoded(head, body, self._longest), self.stamp if used is None else used
        while True:
            try:
                self._replace(file, content, after, used)
                return content[-DIGEST:]
            except Full:
                if not self._drop(file, len(content)):
                    raise

    @_guarded
    def touch(self, owner: str, names: Sequence[str], used: int) -> list[bool]:
        """Documents are used: the first one gets this stamp, each other one the next higher one, and each a higher one
        than it had. Returns which are there."""
        return self._touch([file_of(owner, name, self._secret) for name in names], used)

    def heads(self, owner: str) -> list[bytes | Exception]:
        """The heads of all documents of an owner in any order, or the error of one that cannot be read."""
        return self.within(lambda: [*self._heads(owner)], lists=True)

    def _heads(self, owner: str) -> Iterator[bytes | Exception]:
        for file in self._entries(self._prefix_of(owner)):
            try:
                with self._opened(file, whole=False) as found:
                    if found is not None:
                        yield self._head(file, found)
            except OSError as error:
                yield error

    def _head(self, file: str, source: Source) -> bytes | Exception:
        try:
            return bytes(self._cipher.unseal(head_of(source, self._longest)[0], _place(file, "head")))
        except (OSError, Damaged, Foreign) as error:
            return error

    def stamps(self, owner: str) -> Mapping[str, int]:
        """Of all documents of an owner, for `delete`."""
        entries = self.within(lambda: self._entries(self._prefix_of(owner)), lists=True)
        return {file: found.used for file, found in entries.items()}

    @_guarded
    def delete(self, owner: str, name: str, *, unused_since: Mapping[str, int] | None = None) -> bool:
        """Also where it cannot be read. False if there is none, or if it was used since these `stamps`."""
        file = file_of(owner, name, self._secret)
        return self._remove(file, None if unused_since is None else unused_since.get(file, -1))

    def _prefix_of(self, owner: str) -> str:
        """What the files of an owner begin with."""
        return _hex(owner, self._secret)

    # -- limits -------------------------------------------------------------------------------------------------

    @property
    def _longest(self) -> int:
        """Most bytes of a body."""
        return BODY_LIMIT if self._forgets is None else self._forgets.own

    @property
    def _most_files(self) -> tuple[int, int]:
        """Most documents of one owner, and of all."""
        return (MOST, UNBOUNDED) if self._forgets is None else (UNBOUNDED, self._forgets.most)

    @property
    def _oldest(self) -> int:
        """Lowest stamp of what is not forgotten."""
        return 0 if self._forgets is None else int((self._clock() - self._forgets.seconds) * 1e6)

    def _own(self, cap: int) -> int:
        """Most bytes of one owner where all have at most `cap`."""
        share = int(self._share * cap)
        return share if self._forgets is None else min(share, self._forgets.own)

    def _check_size(self, size: int, beside: Counts, cap: int) -> None:
        """Raise `Full` if a new or replaced file does not fit beside the others, and beside the one that it replaces,
        which is deleted only afterwards."""
        for files, most in zip((beside.own, beside.others), self._most_files, strict=True):
            if files >= most:
                raise Full(f"there are {files} already; at most {most} are allowed")
        if beside.own_bytes + size > (limit := self._own(cap)):
            raise Full(f"it has {size} bytes beside {beside.own_bytes} of others; {limit} bytes are allowed")
        if beside.bytes + size > cap:  # how much other owners have is not for this one to know
            raise Full(f"it has {size} bytes, and there is no space left for documents")

    def _drop(self, file: str, size: int) -> bool:
        """Drop documents so that a `file` of this size fits; False if that is not possible. Those that are used
        meanwhile stay."""
        if self._forgets is None:
            return False
        found = self._entries()
        cap = self._most(sum(one.size for one in found.values()))
        if size > (own := self._own(cap)):
            return False
        space, others = Space(own, cap, self._forgets.most), {name: one for name, one in found.items() if name != file}
        gone = to_drop(others, file, size + (found[file].size if file in found else 0), space, self._oldest)
        removed = [self._remove(name, found[name].used) for name in gone]
        return any(removed)

    def check(self) -> None:
        """Assert what is always true, while nothing is changed."""
        sizes, (own, every) = self._counted(), self._most_files
        assert sizes == Sizes((file, one.size) for file, one in self._entries().items())
        assert sizes.bytes[""] <= self._cap
        assert sizes.counts[""] <= every
        assert all(sizes.bytes[owner] <= self._own(self._cap) for owner in sizes.bytes if owner)
        assert all(sizes.counts[owner] <= own for owner in sizes.counts if owner)

    # -- where they are -----------------------------------------------------------------------------------------

    @contextmanager
    def _locked(self, *, sizes: bool = True) -> Generator[None]:
        """One thread of one process at a time; `_sizes` are those of what is there, and may change, unless that is not
        asked for. Raises `TimeoutError`."""
        if not self._lock.acquire(timeout=WAIT):
            raise TimeoutError(BUSY.format(WAIT))
        try:
            yield
        finally:
            self._lock.release()

    def _replace(self, file: str, content: bytes, after: bytes | None, used: int) -> None:
        """In one step. Raises what `put` raises."""
        self._make()
        with self._locked():
            with self._opened(file) as found:
                seal = b"" if found is None else found.read(DIGEST, max(0, found.size - DIGEST))
            if after not in (None, seal):
                raise Changed
            beside = self._sizes.beside(file)
            self._check_size(len(content), beside, self._most(beside.bytes))
            with self._changing(file, len(content)):
                self._write(file, content, used)

    def _remove(self, file: str, used: int | None) -> bool:
        """In one step, if it has this stamp; None: whatever it has. False if it is not there, or has another one."""
        try:
            with self._locked():
                if (stamp := self._stamp(file)) is None or used not in (None, stamp):
                    return False
                with self._changing(file, 0):
                    self._unlink(file)
        except FileNotFoundError:
            return False
        return True

    def _touch(self, files: Sequence[str], used: int) -> list[bool]:
        found: list[bool] = []
        self._make()
        with self._locked(sizes=False):
            for at, file in enumerate(files):
                if there := (before := self._stamp(file)) is not None:
                    self._mark(file, max(used + at, before + 1))
                found.append(there)
        return found

    @contextmanager
    def _opened(self, file: str, *, whole: bool = True) -> Generator[Source | None]:
        """None if it is not there, or forgotten. `whole`: its body will be read."""
        found = self._contents.get(file)
        yield None if found is None or self._used.get(file, -1) < self._oldest else Content(found)

    def _entries(self, owner: str = "") -> Mapping[str, Stored]:
        """All, or those of the owner with this digest."""
        found = [(file, content) for file, content in [*self._contents.items()] if file.startswith(owner)]
        return {file: Stored(len(content), self._used.get(file, -1)) for file, content in found}

    def _counted(self) -> Sizes:
        with self._locked():
            return self._sizes

    @contextmanager
    def _changing(self, file: str, size: int) -> Generator[None]:
        """While it is locked: a file gets this size in the block; 0: it is deleted."""
        yield
        self._sizes.set(file, size)

    def _make(self) -> None:
        """Something is going to be stored."""

    def _most(self, used: int) -> int:
        """The most bytes of all documents, which take `used` of them."""
        return self._cap

    def _stamp(self, file: str) -> int | None:
        return self._used.get(file)

    def _mark(self, file: str, used: int) -> None:
        self._used[file] = used

    def _write(self, file: str, content: bytes, used: int) -> None:
        self._used[file] = used
        self._contents[file] = content

    def _unlink(self, file: str) -> None:
        """Raises `FileNotFoundError`."""
        if self._contents.pop(file, None) is None:
            raise FileNotFoundError(file)
        del self._used[file]


class Space(NamedTuple):
    """Most bytes of one owner, of all, and most files."""

    own: int
    all: int
    files: int


def to_drop(files: Mapping[str, Stored], file: str, size: int, space: Space, oldest: int) -> list[str]:
    """Which `files` are dropped for another `file` of this size: those with stamps below `oldest`, and where there is
    no space, those with the lowest ones: of its owner, then of the owner that has the most bytes."""
    queues: dict[str, deque[str]] = {_owner(file): deque()}  # by owner, the lowest stamp first
    sizes, gone, count = {_owner(file): 0}, list[str](), len(files)

    def drop(owner: str) -> None:
        gone.append(name := queues[owner].popleft())
        sizes[owner] -= files[name].size

    for name in sorted(files, key=lambda name: files[name].used):
        queues.setdefault(_owner(name), deque()).append(name)
        sizes[_owner(name)] = sizes.get(_owner(name), 0) + files[name].size
    for owner, queue in queues.items():
        while queue and files[queue[0]].used < oldest:
            drop(owner)
    mine = _owner(file)
    if sizes[mine] + size > space.own:
        while queues[mine] and sizes[mine] + size > space.own - space.own // SLACK:
            drop(mine)
    if sum(sizes.values()) + size > space.all or count - len(gone) >= space.files:
        most, fewer = space.all - space.all // SLACK, space.files - space.files // SLACK
        while any(queues.values()) and (sum(sizes.values()) + size > most or count - len(gone) >= fewer):
            drop(max((owner for owner, queue in queues.items() if queue), key=lambda owner: sizes[owner]))
    return gone


class DiskArchive(Archive):
    """Documents in a directory that several processes may use, also of several machines, if its file system has locks
    for them (NFS 4 has). The directory is made when something is stored."""

    def __init__(
        self, directory: Path, cap: int, *, files: Files | None = None, **options: Unpack[ArchiveOptions]
    ) -> None:
        """`cap`: most bytes, and no more than a tenth of what is free on the disk and of the files themselves."""
        super().__init__(cap, **options)
        self._directory, self._files = directory, files or Files()
        self._changes: int | None = None  # of all processes, when `_sizes` were those of the files
        self._opened_lock = -1  # while it is locked

    def _make(self) -> None:
        new = not self._directory.exists()
        make_private(self._directory)
        if new:
            self._files.sync_directory(self._directory.parent)

    @contextmanager
    def _locked(self, *, sizes: bool = True) -> Generator[None]:
        with super()._locked():
            # a file, opened for writing: NFS locks neither directories nor what is opened for reading
            lock = self._directory.with_name(self._directory.name + LOCK)
            opened = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                lock_within(WAIT, opened, BUSY.format(WAIT))
                self._opened_lock = opened
                if sizes:
                    self._count(opened)
                yield
            finally:
                os.close(opened)

    @contextmanager
    def _changing(self, file: str, size: int) -> Generator[None]:
        before, self._changes = self._changes, None
        assert before is not None, "files were not counted"
        os.pwrite(self._opened_lock, (before + 1).to_bytes(8, "little"), 0)
        with super()._changing(file, size):
            yield
        os.pwrite(self._opened_lock, _CHANGE.pack(before + 1, size, file.encode()), _at(before + 1))
        self._changes = before + 1

    def _count(self, lock: int) -> None:
        """Follow what other processes have changed. Where they have ended while they did, or changed too much, count
        the files; what they were writing is deleted."""
        changes = int.from_bytes(os.pread(lock, 8, 0), "little")
        if not self._follow(lock, changes):
            for name in list(self._files.names(self._directory)):
                if name.endswith(PART):
                    self._files.unlink(self._directory / name)
            self._sizes = Sizes((file, one.size) for file, one in self._entries().items())
        self._changes = changes

    def _follow(self, lock: int, changes: int) -> bool:
        """Whether `_sizes` are those of the files after so many changes of all processes."""
        if self._changes is None or not 0 <= changes - self._changes <= FOLLOWED:
            return False
        for number in range(self._changes + 1, changes + 1):
            content = os.pread(lock, _CHANGE.size, _at(number))
            if len(content) != _CHANGE.size:
                return False
            found, size, file = _CHANGE.unpack(content)
            if found != number:
                return False
            self._sizes.set(file.decode("ascii", "replace"), size)
        return True

    @contextmanager
    def _opened(self, file: str, *, whole: bool = True) -> Generator[Source | None]:
        if self._oldest and (used := self._stamp(file)) is not None and used < self._oldest:
            yield None
            return
        try:
            opened = OpenFile(self._files, self._directory / file)
        except FileNotFoundError:
            yield None
            return
        with opened:
            yield opened

    def _entries(self, owner: str = "") -> Mapping[str, Stored]:
        found: dict[str, Stored] = {}
        with suppress(FileNotFoundError):
            for name in self._files.names(self._directory):
                if name.startswith(owner) and not name.endswith(PART):
                    with suppress(OSError):
                        about = os.lstat(f"{self._directory}/{name}")
                        found[name] = Stored(about.st_size, about.st_mtime_ns // 1000)
        return found

    def _most(self, used: int) -> int:
        return min(self._cap, used + int(SHARE_OF_FREE * self._files.free(self._directory)))

    def _stamp(self, file: str) -> int | None:
        try:
            return os.lstat(self._directory / file).st_mtime_ns // 1000
        except FileNotFoundError:
            return None

    def _mark(self, file: str, used: int) -> None:
        self._files.touch(self._directory / file, 1000 * used)

    def _write(self, file: str, content: bytes, used: int) -> None:
        part = self._directory / f"{file}-{secrets.token_hex(4)}{PART}"
        try:
            write(self._files, part, (content,))
            self._files.touch(part, 1000 * used)
            self._files.rename(part, self._directory / file)
        except BaseException:
            with suppress(OSError):
                self._files.unlink(part)
            raise
        self._files.sync_directory(self._directory)

    def _unlink(self, file: str) -> None:
        self._files.unlink(self._directory / file)
        self._files.sync_directory(self._directory)
