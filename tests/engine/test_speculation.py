"""Texts with drafts are the texts without, whatever is drafted, and memory is as after plain decoding."""

import threading
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

import pytest
from torch import Tensor

from kvcellar import Engine, EngineFailed
from kvcellar.engine.core.request import Completion
from kvcellar.engine.speculate.chain import Chain, Key
from kvcellar.engine.speculate.drafter import Committed
from kvcellar.engine.speculate.ngram import NGramDrafter
from kvcellar.engine.speculate.speculator import FAILURES, Speculator
from kvcellar.events import Delta, Done, Event, Failed, Speculation
from kvcellar.memory.memory import Memory
from kvcellar.memory.plan import Plan
from kvcellar.sampling_params import SamplingParams

PROMPTS = ["def add(a, b):\n", "import os\n\n\nclass Path:\n    def __init__(self", "x = 1\nx = 1\nx = 1\nx"]


class Oracle:
    """Knows the texts. Of each round, the first `right` drafts are the text's, and the next is another token."""

    name = "oracle"
    deepest = 8
    catches_up = False
    reads_hidden = False

    def __init__(self, right: int | None = None) -> None:
        self.texts: list[list[int]] = []
        self.right, self.draw = right, Random(1)
        self.rounds: list[int] = []

    def propose(self, chains: Sequence[Chain]) -> None:
        for chain in chains:
            known = [text for text in self.texts if text[: len(chain.text)] == list(chain.text)]
            after = known[0][len(chain.text) :] if known else []
            right = self.right if self.right is not None else self.draw.randrange(6)
            for place in range(chain.left):
                if not chain.left:
                    break
                token = after[place] if place < len(after) else 9
                chain.add(token if place < right else (token + 1) % chain.samplers[0].vocab_size)
            self.rounds.append(len(chain.drafts))

    def committed(self, news: Sequence[Committed]) -> None:
        pass

    def fork(self, key: Key, other: Key) -> None:
        pass

    def forget(self, namespace: str | None, tokens: Sequence[int] = ()) -> None:
        pass

    def close(self, key: Key, *, keep: bool) -> None:
        pass


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(cache_bytes=20_000_000, dtype="float32") as made:
        yield made


def speculates(engine: Engine, oracle: Oracle | None, depth: int = 5) -> None:
    drafting = engine._built.loop.manager.drafting
    drafting.speculator = Speculator(oracle, fixed=depth) if oracle is not None else None


def played(engine: Engine, how: dict[str, Any]) -> list[list[Event]]:
    """The events of all prompts, which run at once, by prompt."""
    params = SamplingParams(**{"max_tokens": 40, "seed": 5, **how})
    engine.clear_cache()
    events: list[list[Event]] = [[] for _ in PROMPTS]
    over = [threading.Event() for _ in PROMPTS]
    for prompt, found, end in zip(PROMPTS, events, over, strict=True):

        def deliver(event: Event, found: list[Event] = found, end: threading.Event = end) -> None:
            found.append(event)
            if isinstance(event, Done | Failed):
                end.set()

        engine.submit(engine.encode(prompt), params, deliver=deliver)
    assert all(end.wait(240) for end in over)
    return events


def texts(events: Sequence[Sequence[Event]]) -> list[Any]:
    """What a client sees, whatever the order of the choices in time."""
    seen: list[Any] = []
    for of in events:
        choices: dict[int, tuple[str, tuple[int, ...]]] = {}
        for event in of:
            if isinstance(event, Delta):
                text, ids = choices.get(event.choice, ("", ()))
                choices[event.choice] = text + event.text, ids + event.token_ids
        done = of[-1]
        assert isinstance(done, Done)
        seen.append((choices, done.usage.completion_tokens))
    return seen


HOW: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "sampled": {"temperature": 0.9, "top_p": 0.95},
    "penalties": {"temperature": 0.7, "repetition_penalty": 1.2, "frequency_penalty": 0.3, "no_repeat_ngram_size": 3},
    "stop strings": {"temperature": 0.0, "stop": ["return", "self.", "= "], "min_tokens": 5},
    "log-probabilities": {"temperature": 0.6, "logprobs": 2},
    "choices": {"temperature": 0.9, "n": 3},
    "one token": {"max_tokens": 1},
}


@pytest.mark.parametrize("right", [0, 1, 2, 4, 5, None])
@pytest.mark.parametrize("kind", HOW)
def test_whatever_is_accepted_the_texts_are_those_of_plain_decoding(engine, kind, right) -> None:
    speculates(engine, None)
    plain = played(engine, HOW[kind])
    oracle = Oracle(right)
    oracle.texts = [
        [*engine.encode(prompt), *(token for event in of if isinstance(event, Delta) for token in event.token_ids)]
        for prompt, of in zip(PROMPTS, plain, strict=True)
    ]
    speculates(engine, oracle)
    drafted = played(engine, HOW[kind])
    assert texts(drafted) == texts(plain)
    assert (sum(oracle.rounds) > 0) == (kind != "one token")
    for of in drafted:
        done = of[-1]
        assert isinstance(done, Done)
        if done.speculation is not None:  # beside a step's, one delta for the first token and one for text held back
            deltas = [event for event in of if isinstance(event, Delta)]
            steps = done.usage.completion_tokens - done.speculation.accepted
            assert len(deltas) <= steps + 2 * len({delta.choice for delta in deltas})
        if done.speculation is not None and right is not None and kind != "choices":
            # What follows the end of the text is not known.
            assert sum(tried - taken for tried, taken in pairs(done.speculation)[:right]) <= 1
            assert not any(taken for _, taken in pairs(done.speculation)[right:])
    assert all(isinstance(of[-1], Done) and of[-1].speculation is None for of in plain)
    engine._built.loop.call(engine._built.loop.check)


def pairs(report: Speculation) -> list[tuple[int, int]]:
    return list(zip(report.tried_at, report.accepted_at, strict=True))


def test_a_request_that_an_error_has_ended_is_closed_in_the_drafter(engine, monkeypatch) -> None:
    drafter = NGramDrafter()
    engine._built.loop.manager.drafting.speculator = Speculator(drafter, fixed=2)
    manager, prompt = engine._built.loop.manager, engine.encode(PROMPTS[2])
    next_end = manager.next_end

    def fails(completion: Completion) -> int:
        if len(completion.tokens) > len(prompt) + 8:
            assert drafter._own
            raise RuntimeError("at some point")
        return next_end(completion)

    monkeypatch.setattr(manager, "next_end", fails)
    with pytest.raises(EngineFailed, match="at some point"):
        engine.generate(prompt, max_tokens=40, temperature=0.0, ignore_eos=True)
    assert not drafter._own
    engine.check()


def test_drafts_that_make_every_step_fail_are_given_up_and_the_text_is_the_same(engine, monkeypatch) -> None:
    speculates(engine, None)
    wanted = engine.generate(PROMPTS[0], max_tokens=20, temperature=0.0, ignore_eos=True).token_ids
    oracle, built = Oracle(3), engine._built
    speculates(engine, oracle)
    forward, failed = built.guest.forward, list[int]()

    def narrow(memory: Memory, plan: Plan, ids: Sequence[int], want: Sequence[int]) -> Tensor:
        if any(feed.revertible for feed in plan.feeds):
            failed.append(len(ids))
            raise RuntimeError("too many rows")
        return forward(memory, plan, ids, want)

    monkeypatch.setattr(built.guest, "forward", narrow)
    found = engine.generate(PROMPTS[0], max_tokens=20, temperature=0.0, ignore_eos=True)
    assert found.token_ids == wanted
    assert len(failed) == FAILURES
    assert "too many rows" in (built.loop.manager.drafting.speculator.refused or "")
