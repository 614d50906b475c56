"""A row whose mask is late skips steps: that changes no token of it, and delays no other row."""

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvcellar import Constraint, Engine, SamplingParams
from kvcellar.engine.sample.mask_threads import Lane, MaskThreads
from kvcellar.engine.sample.matcher import Matcher
from kvcellar.errors import ConstraintFailed
from kvcellar.memory.retention import RetentionOptions
from tests.engine.mixes import Ear, assert_at_rest
from tests.engine.speculating import Oracle, ask, speculates, told

LETTERS = Constraint.regex("([a-c]{2},){60}")
PROMPTS = ("x = ", "def f(a):", "[1, 2")


class SometimesLate:
    """Some masks are late however long they are waited for; so says `seed`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self._draw, self.late = random.Random(seed), 0
        real = Matcher._mask

        def mask(matcher: Matcher, drafts: tuple[int, ...]) -> Any:
            found = real(matcher, drafts)
            if matcher.at_start or self._draw.random() > 0.3:  # the first is known before a request is submitted
                return found
            self.late += 1
            matcher._missed = not drafts
            return None

        monkeypatch.setattr(Matcher, "_mask", mask)
        monkeypatch.setattr(MaskThreads, "wait", self._wait)

    @staticmethod
    def _wait(threads: MaskThreads, lane: Lane, done: Callable[[], bool]) -> bool:
        return threads.changed.wait_for(done, 60)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.slow), 1.0])
def test_late_masks_change_no_token_of_any_row_with_drafts_or_without(monkeypatch, temperature) -> None:
    sampling: dict[str, Any] = {
        "n": 2, "seed": 7, "max_tokens": 32, "temperature": temperature, "constraint": LETTERS,
        "repetition_penalty": 1.05,
    }  # fmt: skip
    with Engine(threads=1, draft="none") as engine:
        prompts = [engine.encode(text) for text in PROMPTS]
        plain = told(prompts, ask(engine, prompts, **sampling))
        with monkeypatch.context() as patched:
            sometimes = SometimesLate(patched, 0)
            assert told(prompts, ask(engine, prompts, **sampling)) == plain
            assert sometimes.late > 20
            speculates(engine, Oracle(plain, 2))
            assert told(prompts, ask(engine, prompts, **sampling)) == plain
            speculates(engine, None)
        assert_at_rest(engine)


def test_masks_that_are_late_also_after_a_preemption_change_no_token(monkeypatch) -> None:
    sampling: dict[str, Any] = {"n": 2, "seed": 7, "max_tokens": 40, "temperature": 1.0, "constraint": LETTERS}
    settings: dict[str, Any] = {"threads": 1, "draft": "none", "context": 128, "step_tokens": 32}
    with Engine(**settings, cache_bytes=11_000_000) as engine:
        prompts = [engine.encode(text) for text in PROMPTS]
        plain = told(prompts, ask(engine, prompts, **sampling))
        has = engine._built.capacity
    # A token takes so many bytes with those of its edits; all answers together have 240. Checkpoints get a quarter.
    few = 4 * (has.scratch + 2 * has.states.sequences * has.states.bytes_per_row + 3_600 * 150) // 3
    with Engine(**settings, cache_bytes=few) as engine:
        sometimes = SometimesLate(monkeypatch, 1)
        assert told(prompts, ask(engine, prompts, **sampling)) == plain
        assert sometimes.late > 20
        assert engine.stats().preemptions > 0
        assert_at_rest(engine)


class Held:
    """Masks behind the first of one constraint are computed when they are let go."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.gate = threading.Event(), threading.Event()
        real = Matcher._computed

        def computed(matcher: Matcher, pending: list[int], drafts: tuple[int, ...]) -> Any:
            if matcher._budget.owner == "held":
                self.begun.set()
                assert self.gate.wait(60)
            return real(matcher, pending, drafts)

        monkeypatch.setattr(Matcher, "_computed", computed)


@pytest.mark.parametrize("count", [1, 8])
def test_others_go_on_while_masks_are_computed_for_as_long_as_that_takes(monkeypatch, count) -> None:
    params = SamplingParams(temperature=1.0, seed=3, n=count, max_tokens=12, constraint=LETTERS)
    with Engine(threads=1, draft="none", max_sequences=16) as engine:
        prompt = engine.encode("x = ")
        alone = ask(engine, [prompt], temperature=1.0, seed=3, n=count, max_tokens=12, constraint=LETTERS)
        held, slow = Held(monkeypatch), Ear()
        engine.submit(prompt, params, deliver=slow, retention=RetentionOptions(owner="held"))
        assert held.begun.wait(60)
        for constraint in (None, LETTERS):
            text = engine.generate("y = ", max_tokens=30, temperature=1.0, seed=1, constraint=constraint).text
            assert text
        assert not slow.reasons
        engine.check()
        held.gate.set()
        slow.wait()
        assert told([prompt], [slow]) == told([prompt], alone)
        assert_at_rest(engine)


def test_a_request_that_is_cancelled_while_its_mask_is_computed_ends_at_once(monkeypatch) -> None:
    with Engine(threads=1, draft="none") as engine:
        held, slow = Held(monkeypatch), Ear()
        params = SamplingParams(max_tokens=12, constraint=LETTERS)
        ticket = engine.submit(engine.encode("x"), params, deliver=slow, retention=RetentionOptions(owner="held"))
        assert held.begun.wait(60)
        ticket.cancel()
        slow.wait()
        assert slow.reasons == {0: "cancelled"}
        held.gate.set()
        assert engine.generate("y", max_tokens=5, constraint=LETTERS).choices
        assert_at_rest(engine)


def test_a_constraint_that_fails_while_its_row_is_late_ends_its_request(monkeypatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("of the library")

    with Engine(threads=1, draft="none") as engine:
        with monkeypatch.context() as patched:
            patched.setattr(Matcher, "_computed", fails)
            with pytest.raises(ConstraintFailed, match="the library failed with MemoryError"):
                engine.generate("x", max_tokens=9, n=2, constraint=LETTERS)
        assert engine.generate("y", max_tokens=5, constraint=LETTERS).choices
        assert_at_rest(engine)
