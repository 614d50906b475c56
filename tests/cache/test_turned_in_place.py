"""Keys that are turned in the cells they are in, because too few are free: only those that no other sequence holds."""

import pytest

from kvcellar.errors import CacheFull
from kvcellar.memory.spans import Span
from tests.laws.dumb import member, shifting, sliding
from tests.laws.player import Player
from tests.laws.watch import nothing_changes

WINDOW = shifting(member("window", sliding(3, 8), [0, 1], (2, 2), 16, 16), turns=True)


@pytest.mark.parametrize("cells", [15, 16, 17, 20])
def test_what_a_fork_still_holds_is_turned_elsewhere_wherever_in_the_text_it_stands(cells: int) -> None:
    """The fork has slid on: it shares the last four cells of the first sequence, which has the first four to itself."""
    player = Player([WINDOW], [cells])
    player.step(player.batch({0: 8}))
    player.step(player.batch({0: 4}))
    player.fork(0, 1, 12)
    player.step(player.batch({1: 4}))
    assert player.memory.free() == {"window": cells - 12}
    if cells < 16:
        with nothing_changes(player.memory), pytest.raises(CacheFull, match="need 8 cells"):
            player.memory.remove(0, Span(0, 4))
    else:
        player.remove(0, Span(0, 4))
        assert player.memory.length(0) == 8
    player.check()
