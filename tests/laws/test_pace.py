"""Long work rests between its pieces; short work never does."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kvcellar.pace import FREE, REST, WORK, Pace


class Clock:
    """CPU time of a thread: what it worked, without its rests."""

    def __init__(self) -> None:
        self.now, self.rests = 0.0, list[float]()

    def sleep(self, seconds: float) -> None:
        assert seconds == REST
        self.rests.append(self.now)


@given(st.lists(st.floats(0.0, 0.004), max_size=300))
def test_between_two_rests_there_is_a_little_work_and_one_piece(pieces: list[float]) -> None:
    clock = Clock()
    pace = Pace(lambda: clock.now, clock.sleep)
    for piece in pieces:
        clock.now += piece
        pace.pause()
    worked = [0.0, *clock.rests, clock.now]
    longest = max(pieces, default=0.0)
    assert all(after - before <= WORK + longest + 1e-9 for before, after in pairwise(worked[1:]))
    assert worked[1] <= FREE + longest + 1e-9
    assert bool(clock.rests) == (sum(pieces) > FREE)
