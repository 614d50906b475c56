"""Things by position are a dict that knows their order."""

from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar.memory.spans import ByPosition

MOVES = st.lists(st.tuples(st.sampled_from(["put", "remove", "last", "cut"]), st.integers(0, 12)), max_size=40)


@settings(derandomize=True, deadline=None, max_examples=100)
@given(MOVES)
def test_things_by_position_are_those_of_a_dict_in_order(moves: list[tuple[str, int]]) -> None:
    ours, plain = ByPosition[str](), dict[int, str]()
    for number, (move, pos) in enumerate(moves):
        if move == "put":
            ours[pos] = plain[pos] = str(number)
        elif move == "remove":
            assert ours.pop(pos, None) == plain.pop(pos, None)
        elif move == "last":
            assert ours.last(pos, -1) == max((at for at in plain if at <= pos), default=-1)
        else:
            behind = ours.cut(pos)
            assert list(behind.items()) == [(at, plain.pop(at)) for at in sorted(plain) if at > pos]
        assert list(ours.items()) == sorted(plain.items())
        assert len(ours) == len(plain)
