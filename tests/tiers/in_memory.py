"""Objects in memory, for the remote tier: a store that tests can make fail."""

from collections.abc import Sequence
from itertools import islice

from kvcellar.memory.tiers.objects import RemoteFailed


class InMemory:
    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.seconds: dict[str, float | None] = {}
        self.fails = False
        self.calls = 0
        self.most = 0  # bytes that there ever were
        self.asked = 0  # bytes, by all readings

    def _call(self) -> None:
        self.calls += 1
        if self.fails:
            raise RemoteFailed("it is gone")

    def read(self, name: str, n: int) -> bytes | None:
        self._call()
        self.asked += n
        found = self.content.get(name)
        return None if found is None else found[:n]

    def write(self, name: str, content: bytes, seconds: float | None) -> None:
        self._call()
        self.content[name], self.seconds[name] = content, seconds
        self.most = max(self.most, sum(map(len, self.content.values())))

    def delete(self, names: Sequence[str]) -> None:
        self._call()
        for name in names:
            self.content.pop(name, None)

    def sizes(self, most: int) -> dict[str, int]:
        self._call()
        return {name: len(found) for name, found in islice(self.content.items(), most)}

    def close(self) -> None:
        pass
