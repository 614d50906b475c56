"""remote_archive: documents in a Valkey or Redis server, which several front ends share, in the format of `archive`.

    <prefix><digest of owner>-<digest of name>    a string for each document
    <prefix>sizes                                 bytes of each, by the rest of its key
    <prefix>used                                  the stamp of each, as a sorted set
    <prefix>totals                                bytes and number of all, and of those of each owner

Always true:
  * each change is one script, which the server runs as a whole: a document and what is counted of it change together;
  * of a document no more is read than one may have, and what is forgotten is deleted by the server itself, too;
  * what the server or its client raises is an `OSError`, as that of a disk.

A server that evicts keys by itself loses documents: each is then as one that was deleted. What is counted is counted
anew where the counts contradict each other, and once a minute before a document is refused: then what the server has
lost or deleted takes no space. It is then used since its count was lost, where it was.
"""

# pyright: standard
# (the types of redis are partial)

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Unpack

from kvcellar.memory.tiers.archive import (
    BESIDE_HEAD,
    HEAD_LIMIT,
    Archive,
    ArchiveOptions,
    Changed,
    Counts,
    Sizes,
    Stored,
)
from kvcellar.memory.tiers.codec import Content, Source
from kvcellar.memory.tiers.objects import RedisServer

OVERHEAD = 1 << 12  # more than the bytes of a document beside its head and body
SCANNED, HEADS = 1000, 100  # names, and heads, for each call of a listing

# KEYS: document, sizes, used, totals, counted. ARGV: its file and owner; and what each script names.
_ADDS = """
local function add(owner, bytes, count)
  for name, more in pairs({[owner] = bytes, ['all'] = bytes, [owner .. '#'] = count, ['all#'] = count}) do
    if more ~= 0 and redis.call('HINCRBY', KEYS[4], name, more) == 0 then redis.call('HDEL', KEYS[4], name) end
  end
end
local function total(name) return tonumber(redis.call('HGET', KEYS[4], name) or 0) end
local function size() return tonumber(redis.call('HGET', KEYS[2], ARGV[1]) or 0) end
"""
# content, whether it replaces a certain document, the seal of that, stamp, milliseconds until it is deleted or 0, most
# files of an owner, most of all, most bytes of an owner, most of all, lowest stamp of what is not forgotten, the prefix
_REPLACE = (
    _ADDS
    + """
if ARGV[4] == '1' then
  local forgotten = tonumber(redis.call('ZSCORE', KEYS[3], ARGV[1]) or ARGV[12]) < tonumber(ARGV[12])
  if (forgotten and '' or redis.call('GETRANGE', KEYS[1], -16, -1)) ~= ARGV[5] then return false end
end
local function recount()
  local used, scores = {}, redis.call('ZRANGE', KEYS[3], 0, -1, 'WITHSCORES')
  for at = 1, #scores, 2 do used[scores[at]] = scores[at + 1] end
  for _, file in ipairs(redis.call('HKEYS', KEYS[2])) do used[file] = used[file] or ARGV[6] end
  redis.call('DEL', KEYS[2], KEYS[3], KEYS[4])
  for file, stamp in pairs(used) do
    local bytes = redis.call('STRLEN', ARGV[13] .. file)
    if bytes > 0 then
      redis.call('HSET', KEYS[2], file, bytes)
      redis.call('ZADD', KEYS[3], stamp, file)
      add(string.match(file, '^[^-]*'), bytes, 1)
    end
  end
end
local new, own, bytes, others = #ARGV[3]
local function fits()
  local before = size()
  local count = before > 0 and 1 or 0
  own, bytes, others = total(ARGV[2] .. '#') - count, total(ARGV[2]) - before, total('all#') - count
  return own < tonumber(ARGV[8]) and others < tonumber(ARGV[9]) and bytes + new <= tonumber(ARGV[10])
      and total('all') + new <= tonumber(ARGV[11])
end
local files = redis.call('HLEN', KEYS[2])
if redis.call('ZCARD', KEYS[3]) ~= files or total('all#') ~= files then
  recount()
elseif not fits() and redis.call('SET', KEYS[5], '1', 'NX', 'EX', 60) then
  recount()
end
if not fits() then return {own, bytes, others, total('all')} end
local before = size()
redis.call('SET', KEYS[1], ARGV[3])
if ARGV[7] ~= '0' then redis.call('PEXPIRE', KEYS[1], ARGV[7]) end
redis.call('HSET', KEYS[2], ARGV[1], new)
redis.call('ZADD', KEYS[3], ARGV[6], ARGV[1])
add(ARGV[2], new - before, before > 0 and 0 or 1)
return {}
"""
)
# the stamp that it must have, or an empty text
_REMOVE = (
    _ADDS
    + """
if ARGV[3] ~= '' and tonumber(redis.call('ZSCORE', KEYS[3], ARGV[1]) or 0) ~= tonumber(ARGV[3]) then return 0 end
local before = size()
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('ZREM', KEYS[3], ARGV[1])
add(ARGV[2], -before, before > 0 and -1 or 0)
return redis.call('DEL', KEYS[1])
"""
)
# KEYS: used, documents. ARGV: stamp, milliseconds or 0, files
_TOUCH = """
local found = {}
for at = 2, #KEYS do
  found[at - 1] = redis.call('EXISTS', KEYS[at])
  if found[at - 1] == 1 then
    local before = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[at + 1]) or 0)
    redis.call('ZADD', KEYS[1], math.max(tonumber(ARGV[1]) + at - 2, before + 1), ARGV[at + 1])
    if ARGV[2] ~= '0' then redis.call('PEXPIRE', KEYS[at], ARGV[2]) end
  end
end
return found
"""
# KEYS: document, used. ARGV: file, lowest stamp, most bytes, and those beside its head if no more is wanted, else 0
_READ = """
local size = redis.call('STRLEN', KEYS[1])
if size == 0 or tonumber(redis.call('ZSCORE', KEYS[2], ARGV[1]) or ARGV[2]) < tonumber(ARGV[2]) then return false end
local most = tonumber(ARGV[3])
local head = redis.call('GETRANGE', KEYS[1], 12, 15)
if ARGV[4] ~= '0' and #head == 4 then most = math.min(most, struct.unpack('<I4', head) + ARGV[4]) end
return {size, redis.call('GETRANGE', KEYS[1], 0, most - 1)}
"""


class RedisArchive(Archive):
    """Documents of all front ends that have the same server and prefix."""

    def __init__(
        self, url: str, prefix: str, cap: int, *, timeout: float = 2.0, **options: Unpack[ArchiveOptions]
    ) -> None:
        """As `RedisServer`."""
        super().__init__(cap, **options)
        server, self._prefix = RedisServer(url, timeout), prefix
        self._redis, self._failing = server.client, server.calls
        scripts = (_REPLACE, _REMOVE, _TOUCH, _READ)
        self._replacing, self._removing, self._touching, self._reading = map(self._redis.register_script, scripts)
        self._keys = [prefix + name for name in ("sizes", "used", "totals", "counted")]

    @property
    def _lasts(self) -> int:
        """Milliseconds until the server deletes a document that is not used; 0: it does not."""
        return 0 if self._forgets is None else max(1, int(1000 * self._forgets.seconds))

    def _replace(self, file: str, content: bytes, after: bytes | None, used: int) -> None:
        limits = (*self._most_files, self._own(self._cap), self._cap, self._oldest)
        replaced = (0, b"") if after is None else (1, after)
        with self._failing():
            found = self._replacing(
                [self._prefix + file, *self._keys],
                [*_parts(file), content, *replaced, used, self._lasts, *limits, self._prefix],
            )
        if found is None:
            raise Changed
        if found:
            self._check_size(len(content), Counts(*found), self._cap)

    def _remove(self, file: str, used: int | None) -> bool:
        with self._failing():
            keys = [self._prefix + file, *self._keys]
            return bool(self._removing(keys, [*_parts(file), "" if used is None else used]))

    def _touch(self, files: Sequence[str], used: int) -> list[bool]:
        with self._failing():
            keys = [self._keys[1], *(self._prefix + file for file in files)]
            return [bool(found) for found in self._touching(keys, [used, self._lasts, *files])]

    @contextmanager
    def _opened(self, file: str, *, whole: bool = True) -> Generator[Source | None]:
        with self._failing():
            found = self._read(file, whole=whole)
        yield None if found is None else Content(found[1], found[0])

    def _counted(self) -> Sizes:
        with self._failing():
            sizes, totals = self._redis.hgetall(self._keys[0]), self._redis.hgetall(self._keys[2])
        found = Sizes((file.decode(), int(size)) for file, size in sizes.items())
        for owner in found.bytes:
            name = (owner or "all").encode()
            found.bytes[owner], found.counts[owner] = int(totals.pop(name)), int(totals.pop(name + b"#"))
        assert not totals, "an owner without documents"
        return found

    def _heads(self, owner: str) -> Iterator[bytes | Exception]:
        files = [*self._entries(self._prefix_of(owner))]
        for at in range(0, len(files), HEADS):
            some = files[at : at + HEADS]
            with self._failing(), self._redis.pipeline(transaction=False) as together:
                for file in some:
                    self._read(file, whole=False, client=together)
                found = together.execute()
            yield from (self._head(file, Content(*one[::-1])) for file, one in zip(some, found, strict=True) if one)

    def _read(self, file: str, *, whole: bool, client: Any = None) -> Any:
        """Size and first bytes of a document; None if it is not there, or forgotten."""
        limits = (HEAD_LIMIT + OVERHEAD + self._longest, 0) if whole else (HEAD_LIMIT + OVERHEAD, BESIDE_HEAD)
        return self._reading([self._prefix + file, self._keys[1]], [file, self._oldest, *limits], client)

    def _entries(self, owner: str = "") -> Mapping[str, Stored]:
        with self._failing():
            sizes = dict(self._redis.hscan_iter(self._keys[0], match=f"{owner}*", count=SCANNED))
            used = dict(self._redis.zscan_iter(self._keys[1], match=f"{owner}*", count=SCANNED))
        return {
            file.decode(errors="replace"): Stored(int(size), int(used.get(file, 0))) for file, size in sizes.items()
        }


def _parts(file: str) -> tuple[str, str]:
    """A file, and the digest of its owner."""
    return file, file.partition("-")[0]
