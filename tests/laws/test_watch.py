"""What watches a memory for changes sees every kind there is."""

from collections.abc import Callable

import pytest

from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.memory import Memory
from kvcellar.memory.spans import Span
from tests.cache.tagged import Tagged
from tests.laws.watch import nothing_changes

CHANGES: dict[str, Callable[[Memory], object]] = {
    "derived": lambda memory: setattr(memory._sequences.record(0), "derived", 2),
    "derived elsewhere": lambda memory: setattr(memory._sequences.record(1), "derived", 2),
    "looked ahead": lambda memory: setattr(memory._sequences.record(0), "ahead", (Span(2, 4),)),
    "another span": lambda memory: setattr(memory._sequences.record(1), "ahead", (Span(1, 3), Span(3, 5))),
    "digest": lambda memory: setattr(memory._sequences.record(0), "digest", "d"),
    "a claim": lambda memory: memory.claims.make(0, Span(0, 2)),
    "capacity": lambda memory: setattr(memory.storage.stores[0].cells, "capacity", 65),
    "scratch": lambda memory: memory.storage.leave_room(7),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_goes_unseen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tagged = Tagged(Sdpa(), names=["full"])
    tagged.step({0: 5})
    tagged.step({1: 5}, [(1, Span(1, 3))])
    tagged.memory._sequences.record(1).derived = 4
    monkeypatch.setattr(Memory, "check", lambda memory: None)
    with pytest.raises(AssertionError), nothing_changes(tagged.memory):
        CHANGES[change](tagged.memory)
