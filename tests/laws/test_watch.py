"""What watches a memory for changes sees every kind there is."""

from collections.abc import Callable

import pytest

from kvcellar.attention.sdpa import Sdpa
from kvcellar.cache.memory import Memory
from kvcellar.spans import Span
from tests.cache.told import Told
from tests.laws.watch import nothing_changes

CHANGES: dict[str, Callable[[Memory], object]] = {
    "derived": lambda memory: memory._sequences.derived._of.update({0: 2}),
    "derived elsewhere": lambda memory: memory._sequences.derived._of.update({1: 2}),
    "looked ahead": lambda memory: memory._sequences.ahead.add(0, [Span(2, 4)]),
    "another span": lambda memory: memory._sequences.ahead.add(1, [Span(5, 6)]),
    "digest": lambda memory: memory._sequences.digests._of.update({0: "d"}),
    "holders of a digest": lambda memory: memory._sequences.digests._who.update({"d": {0}}),
    "capacity": lambda memory: setattr(memory._held[0].cells, "capacity", 65),
    "scratch": lambda memory: memory.leave_room(7),
}


@pytest.mark.parametrize("change", CHANGES)
def test_no_change_goes_unseen(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Told(Sdpa(), names=["full"])
    told.step({0: 5})
    told.step({1: 5}, [(1, Span(1, 3))])
    told.memory._sequences.derived._of[1] = 4
    monkeypatch.setattr(Memory, "check", lambda memory: None)
    with pytest.raises(AssertionError), nothing_changes(told.memory):
        CHANGES[change](told.memory)
