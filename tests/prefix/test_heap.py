"""The heap against a list that is searched: what leaves first, also after things have changed or were put back."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from kvcellar.memory.prefix.node import Ranked
from kvcellar.memory.prefix.order import Heap


@dataclass(eq=False)
class Thing(Ranked):
    live: bool = True


ACTION = st.one_of(
    st.tuples(st.just("push"), st.integers(0, 9), st.integers(0, 3)),
    st.tuples(st.just("pop"), st.booleans(), st.just(0)),
    st.tuples(st.just("end"), st.integers(0, 9), st.just(0)),
)


@given(st.lists(ACTION, max_size=300))
def test_the_lowest_value_leaves_first_and_of_equal_ones_the_one_entered_first(actions) -> None:
    heap = Heap[Thing](lambda thing: thing.live)
    things = [Thing() for _ in range(10)]
    entered: list[Thing] = []  # in order of their latest entry
    for kind, which, value in actions:
        if kind == "push":
            thing = things[which]
            thing.value, thing.live = float(value), True
            heap.push(thing)
            entered = [*(one for one in entered if one is not thing), thing]
        elif kind == "end":
            things[which].live = False
            entered = [one for one in entered if one.live]
        else:
            expected = min(entered, key=lambda thing: thing.value, default=None)
            popped = heap.pop()
            assert popped is expected
            if popped is not None and which:
                heap.put_back(popped)
            elif popped is not None:
                entered.remove(popped)
        assert set(map(id, heap.things())) == set(map(id, entered))
        assert len(heap._entries) <= 64 + 2 * len(entered) + 1
