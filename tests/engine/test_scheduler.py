"""The scheduler's laws, for requests that nobody wrote: who may be served, who must be, and that everybody is."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.engine.core.request import Status
from kvcellar.engine.core.scheduler import EVEN, LEAST_CHUNK, Chunks
from kvcellar.memory import prefix_cache
from kvcellar.memory.cells.layouts import Causal, Chunked, Sliding
from kvcellar.memory.prefix.node import common
from tests.engine.world import Ask, World

CONTEXT = 60
LAYOUTS = st.sampled_from(
    [
        {"causal": Causal()},
        {"sliding": Sliding(5)},
        {"chunked": Chunked(4)},
        {"causal": Causal(), "sliding": Sliding(3)},
        {"sliding": Sliding(6, memory=9), "chunked": Chunked(7)},
    ]
)


@st.composite
def worlds(draw):
    layouts = draw(LAYOUTS)
    cells = {name: draw(st.integers(2, 70)) for name in layouts}
    settings = {"max_sequences": draw(st.integers(1, 6)), "step_tokens": draw(st.sampled_from([1, 2, 3, 7, 16, 64]))}
    drafts = draw(st.one_of(st.none(), st.builds(Random, st.integers(0, 99))))
    world = World(layouts, cells, context=CONTEXT, drafts=drafts, **settings)
    fits = min(
        max(n for n in range(1, CONTEXT + 1) if layout.most_cells(n, 1) <= cells[name])
        for name, layout in layouts.items()
    )
    weights = {"": 1.0, "light": 0.5, "heavy": 2.0}
    owners = st.sampled_from([""] if draw(st.booleans()) else sorted(weights))
    asks = st.builds(
        Ask,
        at=st.integers(0, 40),
        prompt=st.integers(1, min(fits, 30)),
        max_tokens=st.integers(1, 30),
        n=st.one_of(st.just(1), st.integers(1, 2 * settings["max_sequences"])),
        cancel=st.one_of(st.none(), st.none(), st.integers(0, 80)),
        family=st.one_of(st.none(), st.integers(0, 3)),
        owner=owners,
    )
    drawn = draw(st.lists(asks, min_size=1, max_size=14))
    return world, [replace(ask, weight=weights[ask.owner]) for ask in drawn]


def least(world: World, ask: Ask) -> int:
    """Tokens that an answer gets when it is alone: until its end, the context's, or memory's."""
    most = CONTEXT + 1 - ask.prompt
    for name, layout in world.layouts.items():
        room = max(n for n in range(1, CONTEXT + 1) if layout.most_cells(n, 1) <= world.capacity[name])
        most = min(most, room + 1 - ask.prompt)
    return min(ask.max_tokens, most)


@given(worlds())
def test_everybody_is_served_in_their_turn_and_gets_what_they_would_get_alone(made):
    world, asks = made
    world.play(asks)
    for number, ask in enumerate(asks):
        heard = world.heard[number]
        assert heard.over
        for choice, reason in heard.reasons.items():
            if reason == "cancelled":
                assert ask.cancel is not None
                assert heard.tokens(choice) <= ask.max_tokens
            else:
                told, alone = heard.tokens(choice), least(world, ask)
                # One that is resumed holds just the window that its next token sees, which leaves a cell free.
                more = any(layout.keep(CONTEXT) for layout in world.layouts.values())
                most = min(ask.max_tokens, CONTEXT + 1 - ask.prompt)
                assert told == alone or (more and alone < told <= most), f"request {number}, choice {choice}"
        if ask.cancel is None:
            assert set(heard.reasons) == set(range(ask.n))
    world.manager.clear_cache()
    assert world.memory.free() == world.capacity
    assert not world.memory.sequences


def test_drafts_that_are_accepted_save_steps_and_no_more_than_a_budget_are_there():
    asks = [Ask(at=0, prompt=9, max_tokens=40), Ask(at=3, prompt=20, max_tokens=30, n=2)]
    plain, drafted = (
        World({"full": Causal(), "sliding": Sliding(5)}, {"full": 300, "sliding": 100}, step_tokens=12, drafts=drafts)
        for drafts in (None, Random(1))
    )
    for world in (plain, drafted):
        world.play(asks)
    assert not plain.drafted
    assert drafted.drafted > drafted.accepted > 20
    assert plain.turns - drafted.turns > 10


# -- chunks of prompts ------------------------------------------------------------------------------------------------


def played(gap: float, decoding: float, each: float, *, rows: int = 1, alone: bool = True) -> tuple[int, float]:
    """The tokens of a chunk, and the seconds of a step with it, on a machine of that speed, once it is known. `alone`:
    there are steps that decode only."""
    chunks = Chunks(gap)
    chunks.stepped(50, 50, 50 * each)  # the first prompt
    for _ in range(40):
        if alone:
            chunks.stepped(rows, 0, decoding)
        tokens = chunks.tokens(1, rows)
        chunks.stepped(rows + tokens, tokens, decoding + tokens * each)
    most = max(chunks.tokens(1, rows) for _ in range(2))
    return most, decoding + most * each


@given(st.floats(0.02, 1.0), st.floats(0.0001, 0.5), st.floats(1e-6, 0.01))
def test_a_step_beside_streams_takes_less_than_their_gap_or_little_more_than_decoding(gap, decoding, each):
    tokens, seconds = played(gap, decoding, each)
    assert tokens == 2 * LEAST_CHUNK or seconds <= max(gap, 1.55 * decoding, 2 * decoding - 0.7 * gap)
    assert tokens * each >= min(0.4 * decoding, 0.5 * gap), "prompts go on, too"


@given(st.integers(1, 64), st.floats(1e-4, 0.01), st.floats(1e-5, 0.01))
def test_where_every_step_has_prompts_decoding_is_told_apart_from_them(rows, row, each):
    """As in a server whose streams never pause: the parts for prompts were a hundredth of what they could be."""
    tokens, seconds = played(0.1, rows * row, each, rows=rows, alone=False)
    assert tokens == 2 * LEAST_CHUNK or seconds <= max(0.1, 1.75 * rows * row)
    assert tokens * each >= min(0.1 * rows * row, 0.03)


def test_what_a_token_of_a_prompt_takes_is_known_after_any_time_without_prompts():
    chunks = Chunks(0.1)
    for tokens in (40, 80, 40, 80):
        chunks.stepped(1 + tokens, tokens, 0.01 + tokens * 0.0005)
    before = {chunks.tokens(1, 1) for _ in range(2)}
    for _ in range(20_000):
        chunks.stepped(1, 0, 0.01)
    assert max(before) / 1.2 < max(chunks.tokens(1, 1) for _ in range(2)) < 1.2 * max(before)


@pytest.mark.parametrize(
    ("gap", "decoding", "most"),
    [
        (0.1, 0.01, 0.02),  # two steps
        (0.1, 0.04, 0.03),  # what is left of the part of the gap that is for steps
        (0.1, 0.2, 0.1),  # half of decoding that takes longer
        (0.1, 0.0001, 0.002),
    ],
)
def test_what_is_no_step_takes_two_steps_at_most_and_with_one_no_longer_than_streams_may_wait(gap, decoding, most):
    chunks, each = Chunks(gap), 0.0005
    for _ in range(20):
        chunks.stepped(1, 0, decoding)
    assert chunks.between(1) == pytest.approx(most)
    assert chunks.between(0) == pytest.approx(0.7 * gap)
    for tokens in (40, 80, 40, 80):
        chunks.stepped(1 + tokens, tokens, decoding + tokens * each)
    assert chunks.between(1) == pytest.approx(most, rel=0.1)


def test_what_is_no_step_shortens_the_chunk_behind_it():
    chunks = Chunks(0.1)
    for tokens in (40, 80, 40, 80):
        chunks.stepped(1 + tokens, tokens, 0.01 + tokens * 0.0005)
    before = max(chunks.tokens(1, 1) for _ in range(2))
    chunks.waited = 0.02
    assert max(chunks.tokens(1, 1) for _ in range(2)) == pytest.approx(before - 0.02 / 0.0005, abs=3)
    chunks.stepped(1, 0, 0.01)
    assert max(chunks.tokens(1, 1) for _ in range(2)) == pytest.approx(before, rel=0.1)


def test_chunks_differ_so_that_a_slow_first_prompt_is_not_believed_for_ever():
    """Decoding takes 0.11 s of each step, and a token of a prompt 0.2 ms: the first ones took 20 times as long."""
    chunks, tokens = Chunks(0.1), 2 * LEAST_CHUNK
    chunks.stepped(50, 50, 0.2)
    for _ in range(40):
        chunks.stepped(40 + tokens, tokens, 0.11 + tokens * 0.0002)
        tokens = chunks.tokens(1, 40)
    assert tokens * 0.0002 > 0.1 * 0.11


@pytest.mark.parametrize("drawn", [0.004, 0.03])
@pytest.mark.parametrize(
    "asks",
    [
        [Ask(at=10, prompt=100, max_tokens=40, n=31)],
        [Ask(at=10, prompt=3, max_tokens=40)] * 31,
        [Ask(at=10, prompt=200, max_tokens=40, family=0, n=3), *[Ask(11, 200, 40, n=4, family=0)] * 7],
    ],
    ids=["outputs of one request", "short prompts", "a shared prompt"],
)
def test_outputs_begin_in_as_many_steps_as_streams_need(asks, drawn):
    """Drawing a token takes 4 or 30 times what a token of a prompt takes. All begin soon all the same."""
    world = World({"full": Causal()}, {"full": 8000}, max_sequences=32, step_tokens=512, gap=0.1, drawn=drawn)
    times, streams = [0.0], [0]

    def look() -> None:
        times.append(world.now)
        streams.append(sum(one.status is Status.DECODE for one in world.scheduler.running))

    world.play([Ask(at=0, prompt=3, max_tokens=80), *asks], look)
    row = 0.001 + drawn
    for (began, ended), rows in zip(pairwise(times), streams, strict=False):
        assert not rows or ended - began <= max(0.1, 2 * rows * row) + row, f"of a step beside {rows} streams"
    assert streams.index(32) <= 35


@given(st.lists(st.integers(1, 400), min_size=1, max_size=12), st.floats(0.01, 1.0))
def test_steps_of_streams_and_prompts_have_few_numbers_of_rows(prompts, gap):
    """As far as there is a chunk that can be shortened. `play` asserts that all are served."""
    world = World({"full": Causal()}, {"full": 8000}, max_sequences=8, step_tokens=512, gap=gap, drawn=0.004)
    schedule = world.scheduler.schedule

    def scheduled():
        step, stuck = schedule()
        if any(one.completion.status is Status.DECODE for one in step):
            odd = sum(one.rows for one in step) % EVEN
            going_on = [one for one in step if one.completion.status is Status.PREFILL and not one.ends]
            assert odd == 0 or all(one.tokens <= odd for one in going_on)
        return step, stuck

    world.scheduler.schedule = scheduled
    world.play([Ask(0, 3, 80), *(Ask(at=10, prompt=one, max_tokens=5) for one in prompts)])


# -- who waits for whom -----------------------------------------------------------------------------------------------


def turns_of(world: World, asks: list[Ask]) -> dict[int, int]:
    """The turn in which each request was over."""
    over: dict[int, int] = {}

    def look() -> None:
        for number, heard in world.heard.items():
            if heard.over:
                over.setdefault(number, world.turns)

    world.play(asks, look)
    look()
    return over


def test_a_short_prompt_does_not_wait_for_the_whole_of_a_long_one_before_it():
    world = World({"causal": Causal()}, {"causal": 4000}, step_tokens=32)
    over = turns_of(world, [Ask(at=0, prompt=2000, max_tokens=1), Ask(at=3, prompt=12, max_tokens=1)])
    assert over[1] <= 6 < over[0]


def test_a_short_prompt_does_not_wait_for_one_of_two_long_ones_before_it():
    world = World({"causal": Causal()}, {"causal": 5000}, step_tokens=32)
    long = [Ask(at=0, prompt=2000, max_tokens=1), Ask(at=1, prompt=2000, max_tokens=1)]
    over = turns_of(world, [*long, Ask(at=4, prompt=12, max_tokens=1)])
    assert over[2] <= 8 < over[0]


def test_all_outputs_of_a_request_begin_while_long_prompts_are_computed_beside_a_stream():
    world = World({"causal": Causal()}, {"causal": 8000}, max_sequences=16, step_tokens=64, gap=0.1, drawn=0.004)
    long = [Ask(at=4, prompt=2000, max_tokens=1), Ask(at=5, prompt=2000, max_tokens=1)]
    over = turns_of(world, [Ask(at=0, prompt=3, max_tokens=400), *long, Ask(at=20, prompt=20, max_tokens=10, n=8)])
    assert over[3] <= 50 < over[1]


@pytest.mark.parametrize("owner", ["", "another"])
def test_a_request_does_not_wait_for_the_many_outputs_of_one_before_it(owner):
    world = World({"causal": Causal()}, {"causal": 4000}, max_sequences=4, step_tokens=32)
    asks = [Ask(at=0, prompt=5, max_tokens=50, n=16), Ask(at=9, prompt=5, max_tokens=1, owner=owner)]
    over = turns_of(world, asks)
    assert over[1] <= 12 < over[0]


def test_outputs_begin_while_another_request_has_sequences():
    world = World({"causal": Causal()}, {"causal": 4000}, max_sequences=4, step_tokens=32)
    over = turns_of(world, [Ask(at=0, prompt=5, max_tokens=500), Ask(at=1, prompt=5, max_tokens=5, n=12)])
    assert over[1] < 60 < over[0]


def test_owners_have_sequences_by_their_weights():
    world = World({"causal": Causal()}, {"causal": 4000}, max_sequences=6, step_tokens=64)
    kinds = [("light", 1.0), ("heavy", 2.0)]
    asks = [Ask(at=0, prompt=4, max_tokens=40, owner=name, weight=weight) for name, weight in kinds for _ in range(30)]
    seen: list[Counter[str]] = []
    world.play(asks, lambda: seen.append(Counter(one.request.retention.owner for one in world.scheduler.running)))
    assert Counter((of["light"], of["heavy"]) for of in seen[5:100]).most_common(1)[0][0] == (2, 4)


def test_waiting_for_a_shared_prompt_compares_it_once(monkeypatch):
    """Not in each of the steps in which the prompt is computed."""
    compared: list[int] = []
    monkeypatch.setattr(prefix_cache, "common", lambda a, b: compared.append(1) or common(a, b))
    world = World({"causal": Causal()}, {"causal": 4000}, max_sequences=8, step_tokens=16)
    world.play([Ask(at=0, prompt=900, max_tokens=1, family=1) for _ in range(20)])
    assert world.turns > 50
    assert len(compared) <= 20 * 19 // 2
