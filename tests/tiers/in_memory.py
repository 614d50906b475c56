"""Objects in memory, for the remote tier: a store that tests can make fail."""

from collections import Counter
from collections.abc import Sequence
from itertools import islice

from kvcellar.memory.tiers.objects import MOST_MEMBERS, Found, RemoteFailed


class InMemory:
    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.seconds: dict[str, float | None] = {}
        self.fails = False
        self.calls = 0
        self.most = 0  # bytes that there ever were
        self.asked = 0  # bytes, by all readings
        self.buckets: dict[str, list[str]] = {}
        self.by_kind: Counter[str] = Counter()  # calls

    def _call(self, kind: str) -> None:
        self.calls += 1
        self.by_kind[kind] += 1
        if self.fails:
            raise RemoteFailed("it is gone")

    def read(self, names: Sequence[str], n: int) -> list[Found]:
        self._call("read")
        self.asked += n * len(names)
        return [(found[:n], len(found)) if (found := self.content.get(name)) else None for name in names]

    def write(self, name: str, content: bytes, seconds: float | None) -> None:
        self._call("write")
        self.content[name], self.seconds[name] = content, seconds
        self.most = max(self.most, sum(map(len, self.content.values())))

    def delete(self, names: Sequence[str]) -> None:
        self._call("delete")
        for name in names:
            self.content.pop(name, None)

    def names(self, most: int) -> list[str]:
        self._call("names")
        return list(islice(self.content, most))

    def add(self, bucket: str, member: str) -> None:
        self._call("add")
        members = self.buckets.setdefault(bucket, [])
        members[:] = [*(one for one in members if one != member), member]

    def members(self, buckets: Sequence[str]) -> list[list[str]]:
        self._call("members")
        return [self.buckets.get(bucket, [])[-MOST_MEMBERS:] for bucket in buckets]

    def strike(self, listed: Sequence[tuple[str, str]]) -> None:
        if listed:
            self._call("strike")
        for bucket, member in listed:
            left = [one for one in self.buckets.get(bucket, []) if one != member]
            self.buckets[bucket] = left
            if not left:
                del self.buckets[bucket]

    def tidy(self, most: int) -> None:
        pass

    def close(self) -> None:
        pass
