"""Growing and shrinking: all of it or nothing, layer by layer, and never a byte above the cap."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.errors import BadRequest, CapacityTooSmall, WrongStage
from kvcellar.memory.attention.sdpa import Sdpa
from kvcellar.memory.memory import Memory
from tests.cache.tagged import Tagged
from tests.laws.watch import nothing_changes

law = settings(derandomize=True, deadline=None, max_examples=40)


@contextmanager
def allocations(memory: Memory, fails: set[int]) -> Iterator[list[int]]:
    """Every plane that is made, as the bytes of planes that are there then; those numbered in `fails` are not made."""
    seen: list[int] = []
    really = torch.empty
    made: list[torch.Tensor] = []

    def empty(*args: object, **named: object) -> torch.Tensor:
        if len(seen) in fails:
            seen.append(0)
            raise MemoryError("no room for a plane")
        made.append(really(*args, **named))  # pyright: ignore[reportArgumentType, reportCallIssue]
        planes = [plane for store in memory._stores.all for of in store.pool._of.values() for plane in of.values()]
        held = {id(tensor) for plane in planes for tensor in plane._tensors}
        new = sum(tensor.nbytes for tensor in made if id(tensor) not in held)
        made[:] = [tensor for tensor in made[-2:] if id(tensor) not in held]
        seen.append(memory.storage.bytes + new)
        return made[-1]

    with mock.patch.object(torch, "empty", empty):
        yield seen


@law
@given(
    st.lists(st.tuples(st.sampled_from(["full", "window"]), st.integers(1, 90)), min_size=1, max_size=6),
    st.lists(st.dictionaries(st.integers(0, 3), st.integers(1, 5), min_size=1), max_size=5),
)
def test_what_is_held_stays_and_what_is_in_use_cannot_go(sizes, steps) -> None:
    tagged = Tagged(Sdpa(), 40, names=["full", "window"])
    for step, (group, cells) in zip([*steps, {}, {}, {}, {}, {}, {}], sizes, strict=False):
        if step and sum(step.values()) <= min(tagged.memory.free().values()):
            tagged.step(step)
        held = next(held for held in tagged.memory._stores.all if held.group.name == group)
        if cells < held.cells.highest:
            with (
                nothing_changes(tagged.memory),
                pytest.raises(CapacityTooSmall, match=f"to {held.cells.highest} cells"),
            ):
                tagged.memory.storage.resize(group, cells)
            while tagged.memory.storage.compact(16):
                pass
        if cells >= held.cells.highest:
            used = held.cells.used
            tagged.memory.storage.resize(group, cells)
            assert tagged.memory.storage.capacity()[group] == cells
            assert tagged.memory.free()[group] == cells - used
            assert held.pool.bytes == 2 * (cells + 1) * 2 * (4 + 8) * 4
        tagged.check()
    if (room := min(tagged.memory.free().values())) > 0:
        tagged.step({5: room})
        tagged.check()


@pytest.mark.parametrize("cells", [12, 100])
@pytest.mark.parametrize("fails", range(4))
def test_when_even_putting_back_fails_all_tokens_are_held_and_a_group_has_what_is_said(cells: int, fails: int) -> None:
    tagged = Tagged(Sdpa(), 40, names=["full", "window"])
    tagged.step({0: 9})
    with allocations(tagged.memory, set(range(fails, 99))), pytest.raises(MemoryError):
        tagged.memory.storage.resize("full", cells)
    put_back = fails < 2  # no layer was done: each has two planes
    assert tagged.memory.storage.capacity() == {"full": 40 if put_back else min(cells, 40), "window": 40}
    tagged.check()
    tagged.step({0: min(tagged.memory.free().values())})
    tagged.check()
    tagged.memory.storage.resize("full", 60)
    tagged.check()


@law
@given(st.integers(10, 60), st.integers(1, 120), st.integers(0, 40_000), st.integers(0, 500))
def test_the_cap_is_never_exceeded_and_what_would_is_refused(before, after, room, scratch) -> None:
    probe = Tagged(Sdpa(), before, names=["full", "window"])
    cap = probe.memory.storage.bytes + probe.memory.storage.staging + scratch + room
    tagged = Tagged(Sdpa(), before, names=["full", "window"], max_bytes=cap)
    tagged.memory.storage.leave_room(scratch)
    tagged.step({0: 5})
    said = ""
    with allocations(tagged.memory, set()) as seen:
        try:
            tagged.memory.storage.resize("full", max(5, after))
        except CapacityTooSmall as refused:
            said = str(refused)
    assert all(there + scratch <= cap for there in seen)
    if said:
        assert not seen
        assert f"{cap} are allowed" in said
        with allocations(probe.memory, set()) as needed:
            probe.memory.storage.resize("full", max(5, after))
        worst = max([*needed, probe.memory.storage.bytes + probe.memory.storage.staging])
        assert worst + scratch > cap, "it was refused, and would have fitted"
    assert tagged.memory.storage.bytes + tagged.memory.storage.scratch + tagged.memory.storage.staging <= cap
    tagged.check()


def test_a_cap_that_the_planes_do_not_fit_is_refused_before_they_are_made() -> None:
    fits = Tagged(Sdpa(), 30, names=["full"]).memory.storage
    need = fits.bytes + fits.staging
    Tagged(Sdpa(), 30, names=["full"], max_bytes=need)
    with mock.patch.object(torch, "empty", side_effect=AssertionError):
        with pytest.raises(CapacityTooSmall, match=f"{need} bytes would be needed: {fits.bytes} for planes"):
            Tagged(Sdpa(), 30, names=["full"], max_bytes=need - 1)
    tagged = Tagged(Sdpa(), 30, names=["full"], max_bytes=need + 7)
    with nothing_changes(tagged.memory), pytest.raises(CapacityTooSmall, match="step_tokens"):
        tagged.memory.storage.leave_room(8)
    tagged.memory.storage.leave_room(7)


def test_it_waits_for_a_step_to_end_and_knows_its_groups() -> None:
    tagged = Tagged(Sdpa(), names=["full"])
    tagged.begin({0: 3})
    with nothing_changes(tagged.memory), pytest.raises(WrongStage):
        tagged.memory.storage.resize("full", 90)
    tagged.memory.abandon()
    for group, cells in (("other", 9), ("full", 0)):
        with nothing_changes(tagged.memory), pytest.raises(BadRequest, match="the groups are full"):
            tagged.memory.storage.resize(group, cells)
