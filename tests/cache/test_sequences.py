"""Sequences: what is done to one is done to its cells and to every part of what is known of it."""

from collections.abc import Sequence
from typing import Any

import pytest

from kvcellar.attention.sdpa import Sdpa
from kvcellar.cache.memory import Memory
from kvcellar.cache.parts import Part
from kvcellar.plan import Batch, Feed
from kvcellar.spans import Span
from tests.cache.told import Told


class Listener(Part):
    """Knows what it was told, and allows what it is told to allow."""

    def __init__(self) -> None:
        self.told: list[tuple[Any, ...]] = []
        self.floor, self.closes = 0, True

    def deepest(self, seq: int, pos: int) -> int:
        return pos // self.floor * self.floor if self.floor else pos

    def can_close_over(self, seq: int, gone: Span) -> bool:
        return self.closes

    def open(self, seq: int) -> None:
        self.told.append(("open", seq))

    def commit(self, batch: Batch, counts: Sequence[int]) -> None:
        self.told.append(("commit", *counts))

    def fork(self, src: int, dst: int, kept: int) -> None:
        self.told.append(("fork", src, dst, kept))

    def cut(self, seq: int, kept: int) -> None:
        self.told.append(("cut", seq, kept))

    def close_over(self, seq: int, gone: Span) -> None:
        self.told.append(("close over", seq, gone))

    def drop(self, seq: int) -> None:
        self.told.append(("drop", seq))


@pytest.fixture
def heard() -> tuple[Memory, Listener]:
    """A memory with one more part, and two sequences of 8 and 2 tokens."""
    told, listener = Told(Sdpa(), 64, names=["full"]), Listener()
    sequences = told.memory._sequences
    sequences._parts = (*sequences._parts, listener)
    told.step({0: 8, 1: 2})
    assert listener.told == [("open", 0), ("open", 1), ("commit", 8, 2)]
    listener.told.clear()
    return told.memory, listener


def test_a_part_is_told_of_every_change(heard: tuple[Memory, Listener]) -> None:
    memory, listener = heard
    assert memory.fork(0, 1, 6) == 6
    assert memory.remove(0, Span(7, 8)) == 7
    assert memory.remove(0, Span(2, 4)) == 5
    memory.begin(Batch((Feed(1, Span(6, 7)), Feed(9, Span(0, 2)))))
    memory.abandon()
    memory.drop(0)
    assert listener.told == [
        ("fork", 0, 1, 6), ("cut", 0, 7), ("close over", 0, Span(2, 4)), ("open", 9), ("drop", 9), ("drop", 0),
    ]  # fmt: skip
    memory.check()


def test_a_part_says_where_one_can_cut_and_whether_the_middle_can_go(heard: tuple[Memory, Listener]) -> None:
    memory, listener = heard
    listener.floor = 3
    assert (memory.can_cut(0, 5), memory.can_resume(0, 6), memory.can_resume(0, 7)) == (3, True, False)
    assert memory.fork(0, 5, 5) == 3
    assert memory.remove(0, Span(7, 8)) == 6
    assert memory.length(0) == 8
    listener.closes = False
    assert memory.remove(0, Span(3, 5)) == 3
    assert listener.told == [("fork", 0, 5, 3)]


def test_all_that_sequences_know_is_a_part_of_them(heard: tuple[Memory, Listener]) -> None:
    sequences = heard[0]._sequences
    parts = [value for value in vars(sequences).values() if isinstance(value, Part)]
    assert len(parts) == 4
    assert all(part in sequences._parts for part in parts)
