"""remote: snapshots in a store elsewhere, which other servers may share. Objects have the format of `codec`.

What others have stored is looked up by name, by what a text begins with (see `buckets`): the calls for it do not depend
on how many objects there are. What is stored already is not written again.

Each process keeps the cap for what it knows: what it has stored, looked up, and found when `entries` was called. For
that it deletes what it has stored, and forgets what others have. A store that deletes objects by itself may do so: each
is a miss.

Always true:
  * each entry has a snapshot, and what is no entry has none, unless it could not be deleted yet;
  * an object is named in its bucket after it was written, and no longer when it is deleted, or found to be missing;
  * what others have stored is known only if its key is that of its tokens, and is not pinned here;
  * what has expired is not used; it is deleted by who has stored it, or `CLOCKS` later, as clocks of machines differ;
  * no more is read of an object than its description says, and one byte, and no description is longer than `codec`
    allows;
  * without a cipher, what this process has stored is read only as it was stored. What others have stored is checked for
    damage only: every client that can write to the store
    decides its content. A cipher authenticates both.
"""

import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from heapq import nlargest
from itertools import accumulate, count, islice
from typing import NamedTuple, TypeVar

from kvcellar.memory.retention import DEFAULT, Retention, stronger
from kvcellar.memory.snapshot import KEY, SEGMENT, Snapshot
from kvcellar.memory.tiers.buckets import BLOCK, Member, Rest, member_of
from kvcellar.memory.tiers.codec import (
    DIGEST,
    Cipher,
    Content,
    Damaged,
    Foreign,
    Header,
    Plain,
    Reader,
    Replaced,
    TooLarge,
    encoded,
    file_size,
    head_of,
    head_sizes,
    read_header,
    sealed_meta,
)
from kvcellar.memory.tiers.index import Index, Row, Why
from kvcellar.memory.tiers.objects import MOST_MEMBERS, Found, Objects, RemoteFailed
from kvcellar.memory.tiers.tier import NEXT_LOOK, Breaker, Chunk, Entry, Loaded, Take, Tier, fresh

T = TypeVar("T")
log = logging.getLogger("kvcellar.memory.tiers")

CLOCKS = 3600.0  # seconds by which the clocks of machines may differ
FIRST = 16 << 10  # bytes of an object in which its header is looked for
MOST_ENDS = 8  # of the known snapshots of a text, the last ones, after which a look begins, beside its beginning
AHEAD = 16  # places in a text that are asked about at once, as if snapshots had as many tokens as most have
MOST_FOUND = 1024  # snapshots that one look goes on from
MOST_ALIKE = 4  # snapshots that one look reads of those that have other tokens behind the ones in common
MOST_REMEMBERED = 1 << 14  # buckets that were read just now, and names in them
MOST_LISTED = 1 << 17  # objects
MOST_DESCRIBED = 1 << 28  # bytes of all descriptions that are listed
_NAME = re.compile("[0-9a-f]{64}")


def prefix_of(identity: bytes) -> str:
    """Of the names of all objects of an identity."""
    return f"kvcellar-{identity.hex()[:32]}-"


class _Object(NamedTuple):
    """An object as it is known without reading its chunks. `seal`: of what this process has stored, else empty."""

    snapshot: Snapshot
    retention: Retention
    size: int
    seal: bytes = b""


class RemoteTier(Tier):
    """The snapshots of one identity in a store elsewhere."""

    name = "remote"
    copies = 1
    shared = True

    def __init__(
        self,
        objects: Objects,
        *,
        identity: bytes,
        cap: int,
        quota: int | None = None,
        cipher: Cipher | None = None,
        secret: bytes = b"",
        clock: Callable[[], float] = time.time,
        breaker: Breaker | None = None,
    ) -> None:
        """`quota`: bytes for the entries of one owner; None: as many as for all. `secret`: that of the keys. Calls
        nothing yet."""
        super().__init__(breaker or Breaker())
        self._objects, self._identity, self._cipher, self._clock = objects, identity, cipher or Plain(), clock
        self._index = Index(None, cap, self, quota=quota, clock=clock)
        self._snapshots: dict[str, Snapshot] = {}  # by name: that of the object, and a number
        self._numbers, self._secret = count(), secret
        self._read: dict[str, tuple[float, list[Member]]] = {}  # buckets, and when they were read
        self._own: set[str] = set()  # names of what this process has stored
        self._undeleted: set[str] = set()  # what could not be deleted yet: its bytes are counted

    # -- entries ------------------------------------------------------------------------------------------------

    def put(self, snapshot: Snapshot, chunks: Iterable[Chunk], retention: Retention = DEFAULT) -> bool:
        return bool(self._try("storing a snapshot", lambda: self._put(snapshot, chunks, retention)))

    def _put(self, snapshot: Snapshot, chunks: Iterable[Chunk], retention: Retention) -> bool:
        if self._index.renew([snapshot.key], retention):
            return True
        try:
            head = head_of(self._identity, snapshot, retention, sealed_meta(snapshot, self._cipher), self._cipher)
        except TooLarge:
            self.failures["too large"] += 1
            return False
        size = file_size(head, snapshot, self._cipher)
        self._index.erase(list(self._undeleted))
        self._index.expire()
        if self._stored(snapshot, retention):
            return True
        self._objects.tidy(self.cap)
        name = self._named(snapshot)
        if not self._index.reserve(name, size, retention.owner, snapshot.parent):
            self.failures["too large"] += 1
            return False
        lasts = None if retention.expires is None else retention.expires - self._clock()
        try:
            content = b"".join(encoded(head, snapshot, chunks, self._cipher))
            self._objects.write(snapshot.key.hex(), content, lasts)
            self._name(snapshot)
        except RemoteFailed:
            self._undeleted.add(name)  # it may be there all the same
            raise
        except BaseException:
            self._index.release([name])
            raise
        self._own.add(name)
        self._enter(name, _Object(snapshot, retention, size, content[-DIGEST:]))
        return True

    def _stored(self, snapshot: Snapshot, retention: Retention) -> bool:
        """Whether others have stored a snapshot, to be kept for half as long at least: then it is known, and can be
        looked up. Two that store it at once both write it, and the last one is read."""
        try:
            found = self._described(snapshot.key, *self._objects.read([snapshot.key.hex()], FIRST))
        except (Damaged, Foreign):  # it is replaced
            return False
        if found is None or not self._lasts(found.retention, retention):
            return False
        self._name(snapshot)
        kept = replace(stronger(found.retention, retention), expires=found.retention.expires)
        self._enter(self._named(snapshot), found._replace(retention=kept))
        return True

    def _lasts(self, kept: Retention, wanted: Retention) -> bool:
        """Whether an object is there for at least half of the time for which it is wanted."""
        if kept.expires is None or wanted.expires is None:
            return kept.expires is None
        return kept.expires - self._clock() >= max(0.0, (wanted.expires - self._clock()) / 2)

    def _name(self, snapshot: Snapshot) -> None:
        """Let others find it."""
        member = self._rest(snapshot).named(snapshot.key)
        self._objects.add(member.bucket, member.text)

    def _rest(self, snapshot: Snapshot) -> Rest:
        """The tokens of a snapshot, which continue its parent."""
        return Rest(self._identity, self._secret, snapshot.namespace, snapshot.parent, snapshot.tokens)

    def _named(self, snapshot: Snapshot) -> str:
        return f"{snapshot.key.hex()}.{next(self._numbers)}"

    def _enter(self, name: str, found: _Object) -> None:
        """Know an object. Where it is known already, the bytes that were reserved for it are given back."""
        self._snapshots[name] = found.snapshot
        row = Row.of(found.snapshot, found.retention, name, found.size, seal=found.seal)
        if not self._index.enter(row, found.snapshot):
            del self._snapshots[name]
            self._index.release([name])

    def get(self, key: bytes, take: Take = fresh) -> Loaded | None:
        return self._try("reading a snapshot", lambda: self._get(key, take))

    def _get(self, key: bytes, take: Take) -> Loaded | None:
        try:
            known = self._known(key)
            found = known or self._described(key, *self._objects.read([key.hex()], FIRST))
            if found is not None and found.retention.expired(self._clock()):
                if found.retention.expired(self._clock() - CLOCKS):
                    self._remove([key], "expired")
                return None
            chunks = self._chunks(found, take) if found is not None else None
        except (Damaged, Foreign, Replaced) as error:
            self._unusable(key, error)
            return None
        if found is None or chunks is None:
            self._missing(key)
            return None
        if known is None:
            self._enter(self._named(found.snapshot), found)
        return Loaded(found.snapshot, found.retention, chunks)

    def _known(self, key: bytes) -> _Object | None:
        row = self._index.find(key)
        snapshot = self._snapshots.get(row.name) if row is not None else None
        return (
            _Object(snapshot, row.retention, row.size, row.seal) if row is not None and snapshot is not None else None
        )

    def _chunks(self, kept: _Object, take: Take) -> tuple[memoryview, ...] | None:
        """The verified chunks of an object; None if there is none. Memory for them is taken before it is read."""
        key, space = kept.snapshot.key, iter([take(size) for size in kept.snapshot.sizes])
        (found,) = self._objects.read([key.hex()], kept.size + 1)
        if found is None:
            return None
        content, size = found
        if size != kept.size:
            error = Damaged if head_sizes(content)[1] == kept.size else Replaced
            raise error(f"it has not the {kept.size} bytes that it had")
        reader = Reader(Content(content))
        if self._snapshot(key, reader.header) != kept.snapshot:
            raise Replaced("it has another description")
        if not self._cipher.overhead and kept.seal not in (b"", reader.seal):
            raise Replaced("it is not what this process has stored")
        return tuple(reader.chunks(kept.snapshot, self._cipher, lambda _: next(space)))

    def _described(self, key: bytes, found: Found) -> _Object | None:
        """An object by its header, of which the `FIRST` bytes were read; None if there is none."""
        if found is not None and (needed := head_sizes(found[0])[0]) > len(found[0]):
            (found,) = self._objects.read([key.hex()], needed)
        if found is None:
            return None
        header = read_header(Content(*found))
        snapshot = self._snapshot(key, header)
        if self._rest(snapshot).key(len(snapshot.span)) != key:
            raise Damaged("its name is not that of its tokens")
        return _Object(snapshot, replace(header.retention, pinned=False), header.end)

    def _snapshot(self, key: bytes, header: Header) -> Snapshot:
        if (header.identity, header.key) != (self._identity, key):
            raise Damaged("it is another snapshot than the one that was stored")
        return header.snapshot(self._cipher)

    def entries(self) -> list[Entry]:
        self._try("listing entries", self._list)
        found = ((self._snapshots.get(row.name), row.retention) for row in self._index.rows())
        return [Entry(snapshot, retention) for snapshot, retention in found if snapshot is not None]

    def _list(self) -> None:
        """Bring the index up to date with the store: forget what is gone, and read the headers of what is new."""
        names = self._objects.names(MOST_LISTED)
        there = {bytes.fromhex(name) for name in names if _NAME.fullmatch(name)}
        before = {bytes.fromhex(name[: 2 * KEY]): name for name in self._index.names()}
        if len(names) < MOST_LISTED:  # else what is not listed may be there
            gone = [before[key] for key in before.keys() - there]
            self._strike(gone)
            self._index.forget(gone)
        left, new = MOST_DESCRIBED, iter(there - before.keys())
        while left > 0 and (some := list(islice(new, AHEAD))):
            for one in filter(None, self._learn(some)):
                left -= len(one.snapshot.tokens) + len(one.snapshot.record) + 8 * len(one.snapshot.sizes)
        if left <= 0 or len(names) >= MOST_LISTED:
            log.warning("the remote store has more snapshots than this process lists: others are computed again")

    def _learn(self, keys: Sequence[bytes]) -> list[_Object | None]:
        """Know objects by their headers, unless they have expired. None for what is not there, or cannot be read."""
        learned: list[_Object | None] = []
        for key, head in zip(keys, self._objects.read([key.hex() for key in keys], FIRST), strict=True):
            try:
                found = self._described(key, head)
            except (Damaged, Foreign) as error:
                self._unusable(key, error)
                found = None
            if found is not None and not found.retention.expired(self._clock()):
                self._enter(self._named(found.snapshot), found)
            learned.append(found)
        return learned

    # -- what others have stored --------------------------------------------------------------------------------

    def place(self, namespace: str, key: bytes) -> int:
        return hash((namespace, key))

    def look(
        self, namespace: str, key: bytes, known: Sequence[Snapshot], *, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        if wanted():
            self._try("looking for a text", lambda: self._look(namespace, key, known, wanted))

    def _look(self, namespace: str, key: bytes, known: Sequence[Snapshot], wanted: Callable[[], bool]) -> None:
        """Know what has all tokens from the beginning of the text on, or continues one of the last known snapshots of
        it, and what continues that; then a few that have most tokens in common before they differ."""
        seen: dict[bytes | None, int] = {None: 0} | {one.key: one.span.end for one in known}
        begin = Rest(self._identity, self._secret, namespace, None, key)
        rests = [begin, *(replace(begin, parent=one.key, at=one.span.end) for one in known[-MOST_ENDS:])]
        alike: list[tuple[int, Member]] = []
        while rests and len(seen) <= len(known) + MOST_FOUND and wanted():
            asked, found, fits = {rest.parent for rest in rests}, list[Rest](), dict[bytes, tuple[int, Member]]()
            for rest, member in self._members(rests):
                if not rest.has(member):
                    alike.append((rest.at + rest.common(member), member))
                elif member.key not in seen:
                    fits[member.key] = rest.at + member.tokens, member
            for one in self._know([member for _, member in fits.values()]):
                seen[one] = at = fits[one][0]
                found += [] if one in asked else [replace(begin, parent=one, at=at)]
            while found and found[-1].left > SEGMENT and len(found) < AHEAD:
                found.append(found[-1].next())
            rests, alike = found, nlargest(MOST_ALIKE, alike)
        if wanted():
            self._know([member for reaches, member in alike if reaches + BLOCK > max(seen.values())])

    def _members(self, rests: Sequence[Rest]) -> list[tuple[Rest, Member]]:
        """What begins like each of these, from their buckets. These are read at most once in `NEXT_LOOK` seconds."""
        names = {bucket: rest for rest in rests for bucket in rest.buckets}
        now = self._clock()
        read = {bucket: one for bucket, one in dict(self._read).items() if 0 <= now - one[0] < NEXT_LOOK}
        asked = [bucket for bucket in names if bucket not in read]
        for bucket, found in zip(asked, self._objects.members(asked) if asked else [], strict=True):
            read[bucket] = now, self._checked(bucket, found)
        sizes = accumulate(1 + len(members) for _, members in reversed(read.values()))
        kept = sum(n <= MOST_REMEMBERED for n in sizes)
        self._read = dict(islice(read.items(), len(read) - kept, None))
        found = [(rest, member) for bucket, rest in names.items() for member in read[bucket][1]]
        return [*found, *((rest, one) for rest in rests for one in self._likely(rest, read))]

    def _likely(self, rest: Rest, read: Mapping[str, tuple[float, list[Member]]]) -> list[Member]:
        """What may be left out of a bucket that has more names than are read: of as many tokens as most have."""
        full = rest.left >= SEGMENT and len(read[rest.buckets[0]][1]) >= MOST_MEMBERS
        return [rest.first().named(rest.key(SEGMENT))] if full else []

    def _checked(self, bucket: str, names: Iterable[str]) -> list[Member]:
        """Those of the names in a bucket that are of its form. The others are removed."""
        found = {name: member_of(bucket, name) for name in names}
        if wrong := [(bucket, name) for name, member in found.items() if member is None]:
            self.failures["damaged"] += len(wrong)
            self._objects.strike(wrong)
        return [member for member in found.values() if member is not None]

    def _know(self, members: Sequence[Member]) -> list[bytes]:
        """The keys of those members of buckets that are known then; what is not there is removed from its bucket."""
        new = [member for member in members if not self.contains(member.key)]
        found = zip(new, self._learn([member.key for member in new]) if new else (), strict=True)
        late = self._clock() - CLOCKS
        gone = [member for member, one in found if one is None or one.retention.expired(late)]
        self._objects.strike([(member.bucket, member.text) for member in gone])
        return [member.key for member in members if self.contains(member.key)]

    def remove(self, keys: Iterable[bytes]) -> None:
        self._try("removing", lambda: self._remove(list(keys)))

    def close(self) -> None:
        with suppress(RemoteFailed):
            self._objects.close()

    def check(self) -> None:
        """Assert what is always true."""
        names = self._index.names()
        assert names <= self._snapshots.keys() <= names | self._undeleted
        assert self._own <= names

    # -- inside -------------------------------------------------------------------------------------------------

    def _remove(self, keys: list[bytes], why: Why = "removed") -> None:
        """Also objects that are not known."""
        rows = [self._index.find(key) for key in keys]
        found = [row.name for row in rows if row is not None and row.name not in self._own]
        self._own.update(found)  # so that they are deleted, too
        self._index.remove(keys, why)
        self._objects.delete([key.hex() for key, row in zip(keys, rows, strict=True) if row is None])

    def delete(self, names: list[str]) -> list[str]:
        """What others have stored is only forgotten: they may use it."""
        own = [name for name in names if name in self._own]
        self._undeleted.update(own)
        self._objects.delete([name[: 2 * KEY] for name in own])
        self._strike(own)
        self._undeleted.difference_update(names)
        for name in names:
            self._drop(name)
        return names

    def _drop(self, name: str) -> None:
        """It is no entry any longer."""
        self._snapshots.pop(name, None)
        self._own.discard(name)

    def _strike(self, names: Iterable[str]) -> None:
        """Snapshots are not there any longer: their buckets do not name them."""
        gone = [(snapshot, name) for name in names if (snapshot := self._snapshots.get(name)) is not None]
        members = [self._rest(snapshot).named(snapshot.key) for snapshot, _ in gone]
        self._objects.strike([(member.bucket, member.text) for member in members])
        for _, name in gone:
            self._drop(name)

    def _missing(self, key: bytes) -> None:
        """An object is not there. It counts as a failure if it was known: the store has lost or evicted it."""
        if (row := self._index.find(key)) is not None:
            self._strike([row.name])
            self.failures["gone"] += self._index.forget([row.name])

    def _unusable(self, key: bytes, error: Exception) -> None:
        """Count an object that could not be read. What is damaged is removed."""
        if isinstance(error, Foreign):
            self.failures["foreign"] += 1
            return
        if isinstance(error, Replaced):
            self.failures["replaced"] += 1
            if (row := self._index.find(key)) is not None:
                self._drop(row.name)
                self._index.forget([row.name])
            return
        self.failures["damaged"] += 1
        log.warning("reading the remote snapshot %s failed: %s", key.hex()[:16], error)
        self._remove([key], "damaged")

    def _try(self, what: str, act: Callable[[], T]) -> T | None:
        if self.down:
            self.failures["down"] += 1
            return None
        try:
            found = act()
        except RemoteFailed as error:
            self.failures["unreachable"] += 1
            self._breaker.failed()
            log.warning("%s failed: %s: %s", what, error, error.__cause__)
            return None
        self._breaker.succeeded()
        return found
