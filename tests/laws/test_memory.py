"""The memory against a dumb model: random lives of everything that can be done to it, on every layout and storage.

After each operation `check()` holds, and every cell encodes its token. Sometimes a fault is injected in the middle
of an operation: nothing has changed then, and it works when it is tried again. See `player`, which plays and judges.
"""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import settings

from kvcellar.memory.shapes import StoredAs
from tests.laws.dumb import Member, causal, chunked, encoder, kept_as, member, shifting, sliding, straight
from tests.laws.lives import FLOATS, Life

CAUSAL = member("full", causal(), [0, 5], (4, 2), 16, 24)
SLIDING = member("window", sliding(4, 4), [1, 2], (2, 1), 32, 40)
REMEMBERING = member("memory", sliding(3, 8), [3], (3, 3), 24, 16)
CHUNKED = member("chunk", chunked(4), [4], (4, 1), 40, 32)
NARROW = member("last", sliding(1, 1), [6], (2, 2), 16, 16)
INPUT = member("cross", encoder(9), [7, 8], (2, 2), 16, 16)
WIDE = member("wide", encoder(9), [9], (2, 1), 160, 33)  # two scales a vector
TURNING = shifting(CAUSAL, turns=True)

LAYOUTS: dict[str, tuple[Member, ...]] = {
    "causal": (CAUSAL,),
    "sliding": (SLIDING,),
    "sliding with memory": (REMEMBERING,),
    "sliding by one": (NARROW,),
    "chunked": (CHUNKED,),
    "memory and chunks": (REMEMBERING, CHUNKED),
    "shifting": (TURNING, shifting(REMEMBERING, turns=False)),
    "shifting windows": (shifting(SLIDING, turns=True), shifting(REMEMBERING, turns=True)),
    "shifting chunks": (shifting(CHUNKED, turns=True), shifting(NARROW, turns=False)),
    "shifting beside inputs": (INPUT, TURNING, WIDE),
    "windows alone look ahead": (straight(CAUSAL), SLIDING),
    "all at once": (CAUSAL, SLIDING, INPUT, REMEMBERING, CHUNKED),
}
STORED = ("fp8", "int8", "int4", "int8+hadamard", "k=int4+hadamard,v=fp8", "k=fp8+hadamard,v=int4", "k=float64,v=int8")

ALWAYS = {"begin", "put", "attend", "commit", "accept", "abandon", "reserve", "fork", "remove", "drop", "clear"}
ALWAYS |= {"claim", "assemble", "split", "join", "drop_claim", "drop_checkpoint", "forget", "copy"}
ALWAYS |= {"compact", "moved", "leave_room", "broken", "BadRequest", "CacheFull", "CapacityTooSmall"}
INPUTS = {"write_input", "share_input", "read_input"}


def live(members: Sequence[Member], share: float, dtypes: Sequence[torch.dtype] = FLOATS) -> set[str]:
    """So many lives as the profile has examples, times `share`; what was done in them."""
    done: Counter[str] = Counter()
    for seed in range(max(1, int(settings.default.max_examples * share))):
        done += Life(members, seed, dtypes).play(40)
    return set(done)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_memory_of_any_layout_is_what_lists_of_tokens_say(layout: str) -> None:
    members = LAYOUTS[layout]
    done = live(members, 0.24)
    shifts = {"shift"} if "shifting" in layout else {"NotSupported"}
    shifts |= {"in place"} if layout == "shifting" else set()  # of windows, few cells move
    assert done >= ALWAYS | shifts | (INPUTS if INPUT in members else set()), "something was never done"


@pytest.mark.parametrize("text", [*STORED[::2], *(pytest.param(text, marks=pytest.mark.slow) for text in STORED[1::2])])
def test_a_memory_of_any_storage_is_what_lists_of_tokens_say(text: str) -> None:
    stored = StoredAs.parse(text)
    members = [kept_as(m, stored) for m in (TURNING, shifting(REMEMBERING, turns=True), WIDE)]
    assert live(members, 0.14, [torch.float32]) >= ALWAYS | INPUTS | {"shift"}, "something was never done"
