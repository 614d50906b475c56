"""Which part of a sequence still encodes what was removed from it: all that was read behind the removal, no more."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.zeros import put_zeros
from kvcellar.memory.attention.reference import Reference
from kvcellar.memory.cells.layouts import Causal
from kvcellar.memory.kv.group import Group
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.shapes import Plane
from kvcellar.memory.spans import Span

WHAT = st.sampled_from(["read", "read", "middle", "middle", "end", "fork"])
OPERATIONS = st.lists(st.tuples(WHAT, st.integers(0, 2), st.integers(0, 30), st.integers(1, 6)), max_size=12)


def first_marked(marks: list[bool]) -> int | None:
    return marks.index(True) if True in marks else None


@settings(derandomize=True, deadline=None, max_examples=200)
@given(OPERATIONS)
def test_what_was_read_behind_a_removal_is_derived(operations: list[tuple[str, int, int, int]]) -> None:
    """The dumb way: each token is marked if it was read with something before it that is gone, or marked itself."""
    planes = (Plane("k", 1, 8), Plane("v", 1, 8))
    memory = Memory(
        [Group("full", Causal(), planes, (0,), no_shift=None)],
        cells={"full": 400},
        dtype=torch.float32,
        device="meta",
        backend=Reference(),
    )
    marks: dict[int, list[bool]] = {}
    for what, seq, at, n in operations:
        here = marks.get(seq, [])
        at = at % (len(here) + 1)
        if what == "read":
            put_zeros(memory, memory.begin(Batch((Feed(seq, Span(len(here), len(here) + n)),))))
            memory.commit()
            marks[seq] = here + [True in here] * n
        elif what == "middle" and at + n < len(here):
            memory.remove(seq, Span(at, at + n))
            marks[seq] = here[:at] + [True] * (len(here) - at - n)
        elif what == "end" and seq in marks:
            memory.remove(seq, Span(at, len(here)))
            marks[seq] = here[:at]
        elif what == "fork" and seq in marks:
            memory.fork(seq, seq + 1, at)
            marks[seq + 1] = here[:at]
        memory.check()
        for each in marks:
            assert memory.derived(each) == first_marked(marks[each])


def edited_at_two() -> Memory:
    """Sequence 0 has 7 tokens; what stands at 2 and behind was read with something before it that is gone."""
    group = Group("full", Causal(), (Plane("k", 1, 8), Plane("v", 1, 8)), (0,), no_shift=None)
    memory = Memory([group], cells={"full": 40}, dtype=torch.float32, device="meta", backend=Reference())
    put_zeros(memory, memory.begin(Batch((Feed(0, Span(0, 9)),))))
    memory.commit()
    assert memory.derived(0) is None
    memory.remove(0, Span(2, 4))
    assert memory.derived(0) == 2
    return memory


def test_what_precedes_a_removal_is_not_derived() -> None:
    memory = edited_at_two()
    memory.fork(0, 1, 3)
    memory.fork(0, 2, 2)
    assert (memory.derived(1), memory.derived(2)) == (2, None)
    memory.remove(1, Span(2, 3))
    assert memory.derived(1) is None
    memory.fork(0, 1, 7)
    memory.remove(1, Span(3, 7))
    assert memory.derived(1) == 2


def test_who_is_gone_is_not_derived() -> None:
    memory = edited_at_two()
    memory.drop(0)
    put_zeros(memory, memory.begin(Batch((Feed(0, Span(0, 9)),))))
    memory.commit()
    assert memory.derived(0) is None
