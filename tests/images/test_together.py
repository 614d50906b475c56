"""Tokens that see each other, as those of an image or of a whole prompt, are in one step, and neither they nor streams
wait long: `World` asserts that in each step."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcellar.engine.core.request import Completion
from kvcellar.memory.cells.layouts import Causal, Sliding
from tests.engine.world import Ask, World

STEP = 32
LAYOUTS = st.sampled_from([{"full": Causal()}, {"full": Causal(), "sliding": Sliding(40)}])


def a_prompt(draw: Random, whole: bool) -> Ask:
    """With up to three images, some of which leave few places of a step, or none."""
    images, at = list[tuple[int, int]](), draw.randrange(8)
    for _ in range(draw.randrange(4)):
        rows = draw.choice([2, 5, STEP - 3, STEP - 1, STEP])
        if whole and at + rows >= STEP:
            break
        images.append((at, rows))
        at += rows + draw.randrange(6)
    tokens = draw.choice([STEP, STEP - 1, min(STEP, at + 1)]) if whole else at + draw.randint(1, 9)
    return Ask(
        at=draw.randrange(30),
        prompt=tokens,
        max_tokens=draw.choice([1, 8, 40]),
        n=draw.choice([1, 1, 3]),
        cancel=draw.choice([None, None, draw.randrange(60)]),
        family=draw.choice([None, 0]),
        owner=draw.choice(["", "other"]),
        images=tuple(images),
        whole=whole,
        logprobs=not whole and draw.random() < 0.3,
    )


@given(st.integers(0, 1 << 30), LAYOUTS, st.booleans(), st.sampled_from([None, 0.02, 1.0]), st.booleans())
def test_neither_streams_nor_tokens_that_see_each_other_wait_for_more_than_a_step(seed, layouts, whole, gap, drafts):
    """Streams, prompts without images and prompts with some, in memory that is scarce or not."""
    draw = Random(seed)
    streams = [
        Ask(at=0, prompt=draw.randint(1, 9), max_tokens=draw.choice([20, 80])) for _ in range(draw.randint(0, 5))
    ]
    texts = [Ask(at=draw.randrange(30), prompt=draw.randint(1, 200), max_tokens=3) for _ in range(draw.randrange(3))]
    asks = [*streams, *([] if whole else texts), *(a_prompt(draw, whole) for _ in range(draw.randint(1, 5)))]
    most = max(one.prompt + one.max_tokens for one in asks)
    spare = draw.choice([0, 100, 2000])
    cells = {name: layout.most_cells(most, STEP) + STEP + spare for name, layout in layouts.items()}
    world = World(
        layouts,
        cells,
        max_sequences=draw.randint(1, 8),
        step_tokens=STEP,
        gap=gap,
        drafts=Random(seed) if drafts else None,
    )
    world.scheduler._scored, world.scheduler._scored_beside = 9, 3
    world.play(asks)
    for number, ask in enumerate(asks):
        reasons = world.heard[number].reasons
        assert ask.cancel is not None or reasons == dict.fromkeys(range(ask.n), "length")
        for choice, reason in reasons.items():
            assert reason == "cancelled" or world.heard[number].tokens(choice) == ask.max_tokens


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("streams", [1, 6])
@pytest.mark.parametrize("tokens", [STEP, STEP - 3])
@pytest.mark.parametrize("drafts", [False, True])
def test_what_a_step_has_to_have_whole_does_not_wait_for_the_end_of_streams(whole, streams, tokens, drafts):
    world = World(
        {"full": Causal()},
        {"full": 8000},
        max_sequences=8,
        step_tokens=STEP,
        gap=0.1,
        drafts=Random(1) if drafts else None,
    )
    over: dict[int, int] = {}
    given: list[int] = []

    def look() -> None:
        given.append(sum(world.heard[at].tokens(0) for at in range(streams) if at in world.heard))
        for number in [*range(streams, streams + 4)]:
            if number in world.heard and world.heard[number].over:
                over.setdefault(number, world.turns)

    asked = [Ask(at=20, prompt=tokens, max_tokens=1, images=((0, tokens - 1 - n),), whole=whole) for n in range(4)]
    world.play([*(Ask(0, 3, 400) for _ in range(streams)), *asked], look)
    assert sorted(over) == [*range(streams, streams + 4)]
    assert max(over.values()) <= 20 + 2 * 4 + 4, "two steps each"
    assert given[34] - given[20] >= streams * 7, "streams have every second step"


def test_tokens_that_see_each_other_are_together_where_a_step_has_the_logits_of_fewer(monkeypatch):
    """Also where all of them had some, as the tokens of text inside of an image."""
    monkeypatch.setattr(Completion, "scored", lambda self, tokens: range(tokens) if self.reads else ())
    world = World({"full": Causal()}, {"full": 8000}, step_tokens=STEP)
    world.scheduler._scored = world.scheduler._scored_beside = 3
    asks = [Ask(0, 40, 3, images=((at, 9), (at + 12, STEP - 13)), logprobs=True) for at in (0, 2, 5)]
    world.play([Ask(0, 3, 90), *asks])
    assert all(heard.reasons == {0: "length"} for heard in world.heard.values())


def test_outputs_of_a_whole_prompt_share_it_beside_streams():
    world = World({"full": Causal()}, {"full": 8000}, max_sequences=8, step_tokens=STEP, gap=0.1, drawn=0.004)
    world.play([Ask(0, 3, 60), Ask(at=10, prompt=STEP - 2, max_tokens=20, n=4, whole=True)])
    assert world.fed == (3 + 59) + (STEP - 2 + 4 * 19)


def test_streams_go_on_where_the_prompt_that_they_were_left_out_for_is_preempted():
    """It ranks last and is as long as a step, which has nothing then, and is scheduled once more."""
    world = World({"full": Causal()}, {"full": 82}, max_sequences=8, step_tokens=STEP)
    schedule, begun, inside = world.scheduler.schedule, [0], list[int]()

    def scheduled():
        begun[0] += 1
        inside.append(begun[0])
        try:
            return schedule()
        finally:
            begun[0] -= 1

    world.scheduler.schedule = scheduled
    streams = [Ask(at=0, prompt=3, max_tokens=11, owner=f"{at}") for at in range(3)]
    world.play([*streams, *(Ask(at=2, prompt=STEP, max_tokens=most, owner="0", whole=True) for most in (4, 5))])
    assert max(inside) == 2
    assert all(heard.reasons == {0: "length"} for heard in world.heard.values())
