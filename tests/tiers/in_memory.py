"""Objects in memory, for the remote tier: a store that tests can make fail."""

from collections.abc import Sequence

from kvcellar.tiers.objects import RemoteFailed


class InMemory:
    def __init__(self) -> None:
        self.content: dict[str, bytes] = {}
        self.seconds: dict[str, float | None] = {}
        self.fails = False
        self.calls = 0
        self.most = 0  # bytes that there ever were

    def _call(self) -> None:
        self.calls += 1
        if self.fails:
            raise RemoteFailed("it is gone")

    def read(self, name: str, n: int | None = None) -> bytes | None:
        self._call()
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

    def sizes(self) -> dict[str, int]:
        self._call()
        return {name: len(found) for name, found in self.content.items()}

    def close(self) -> None:
        pass
