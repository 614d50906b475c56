"""A memory whose keys and values encode the number of their token, and the lists of tokens that it should hold."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count

import torch

from kvcellar.memory.attention.reference import attend_dense
from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
from kvcellar.memory.kv.history import Backend
from kvcellar.memory.layout import Layout
from kvcellar.memory.memory import Group, Memory
from kvcellar.memory.plan import Batch, Feed, Plan
from kvcellar.memory.shapes import Plane, Scoring
from kvcellar.memory.spans import Span

PLANES = (Plane("k", 2, 4), Plane("v", 2, 8))
LAYOUTS: dict[str, Layout] = {"full": Causal(), "window": Sliding(5), "memory": Sliding(3, 7), "chunk": Chunked(4)}


class Tagged:
    """Each group has two layers. `tokens[seq]` are the numbers of all tokens of a sequence."""

    def __init__(
        self, backend: Backend, cells: int = 64, *, names: Sequence[str] = tuple(LAYOUTS), **more: object
    ) -> None:
        self.groups = [
            Group(name, LAYOUTS[name], PLANES, (2 * i, 2 * i + 1), no_shift=None) for i, name in enumerate(names)
        ]
        self.memory = Memory(
            self.groups,
            cells=dict.fromkeys(names, cells),
            dtype=torch.float32,
            device="cpu",
            backend=backend,
            **more,  # pyright: ignore[reportArgumentType]
        )
        self.tokens: dict[int, list[int]] = {}
        self._numbers = count(1)

    def some_ahead(self, feeds: Mapping[int, int], draw: Callable[[int, int], int]) -> list[tuple[int, Span]]:
        """Of each feed, tokens that look ahead, if any: `draw` chooses numbers between two, those included."""
        found: list[tuple[int, Span]] = []
        for seq, n in feeds.items():
            start, a = self.memory.length(seq), draw(0, n)
            b = draw(a, n)
            found += [(seq, Span(start + a, start + b))] if b > a else []
        return found

    def begin(
        self, feeds: Mapping[int, int], ahead: Sequence[tuple[int, Span]] = ()
    ) -> tuple[Plan, dict[int, list[int]]]:
        """A step in which every sequence gets so many tokens, stored but not committed; the plan, and their numbers."""
        starts = {seq: self.memory.length(seq) for seq in feeds}
        batch = Batch(tuple(Feed(seq, Span(starts[seq], starts[seq] + n)) for seq, n in feeds.items()), tuple(ahead))
        plan = self.memory.begin(batch)
        new = {seq: [next(self._numbers) for _ in range(n)] for seq, n in feeds.items()}
        self.put([token for tokens in new.values() for token in tokens])
        return plan, new

    def step(self, feeds: Mapping[int, int], ahead: Sequence[tuple[int, Span]] = ()) -> None:
        _, new = self.begin(feeds, ahead)
        self.memory.commit()
        for seq, tokens in new.items():
            self.tokens.setdefault(seq, []).extend(tokens)

    def put(self, tokens: Sequence[int]) -> None:
        for group in self.groups:
            for layer in group.layers:
                values = torch.tensor(tokens, dtype=torch.float32)[:, None, None] + layer / 100
                self.memory.put(layer, values.expand(-1, 2, 4), -values.expand(-1, 2, 8))

    def visible(self, layer: int) -> list[set[int]]:
        """The tokens that each row of the open step sees in a layer."""
        k, v, visible = self.memory.get(layer).dense()
        assert torch.equal(k[:, 0, 0], -v[:, 0, 0])
        tokens = (k[:, 0, 0] - layer / 100).round().int().tolist()
        assert len(set(tokens)) == len(tokens), "a cell is there twice"
        return [{tokens[i] for i in row.nonzero().flatten().tolist()} for row in visible]

    def attends(self, layer: int) -> None:
        """The result of the backend equals attention over the dense view."""
        k, v, visible = self.memory.get(layer).dense()
        q = torch.randn(len(visible), 4, 4, generator=torch.Generator().manual_seed(layer))
        scoring = Scoring(scale=1e-3)
        expected = attend_dense(q, k, v, visible, scoring)
        torch.testing.assert_close(self.memory.attend(layer, q, scoring), expected, atol=1e-4, rtol=1e-5)

    def check(self) -> None:
        """Every sequence holds its own tokens, in order, in every layer and plane."""
        self.memory.check()
        assert set(self.memory.sequences) == set(self.tokens)
        for seq, tokens in self.tokens.items():
            assert self.memory.length(seq) == len(tokens)
            for index, group in enumerate(self.groups):
                table = self.memory._sequences.known(seq)[index]
                cells = torch.tensor([c for run in table.runs for c in range(run.cell, run.end)], dtype=torch.long)
                for layer in group.layers:
                    for plane, sign in (("k", 1), ("v", -1)):
                        stored = self.memory.storage.stores[index].pool.planes(layer)[plane].values(cells)
                        wanted = torch.tensor(tokens[table.first :], dtype=torch.float32) + layer / 100
                        assert torch.equal(stored, sign * wanted[:, None, None].expand(stored.shape))

    def runs(self, index: int) -> int:
        return sum(len(table.runs) for table in self.memory._sequences.tables(index))
