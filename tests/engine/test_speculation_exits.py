"""However a round ends, what follows is plain decoding's: errors in the draft, the forward, the verification and the
commit, cancellation, and every reason for which a text ends, is preempted or shifted.

The network is the one of `test_breaking`: what it draws depends on every cell that it may see, and on no rounding. So
memory is compared bit for bit.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import pytest

from kvcellar import Engine, EngineFailed
from kvcellar.engine.core import runner as runners
from kvcellar.engine.core.request import Completion
from kvcellar.events import Event
from kvcellar.sampling_params import SamplingParams
from tests.engine.mixes import Ear, assert_at_rest, bytes_for, made
from tests.engine.speculating import Oracle, Rounds, ask, report, speculates, told, watched
from tests.engine.test_breaking import GREEDY, Fault, Mix, reads_what_it_sees
from tests.engine.test_limits import held
from tests.laws.watch import everything
from tests.zoo import ARCHS, layers

CALLS = (0, 5)
PROMPTS = [[5, 6, 7], list(range(40, 52)), [9]]
SETTINGS: dict[str, Any] = {"context": 32, "step_tokens": 10, "max_sequences": 5, "threads": 1}


def played(mix: Mix) -> list[Ear]:
    mix.engine.clear_cache()
    return mix.play()


@pytest.fixture(scope="module")
def mix() -> Iterator[Mix]:
    """Memory for 50 tokens: some completions are preempted, some shifted, and what the prefix cache has is evicted."""
    network = ARCHS["ministral"].build(num_hidden_layers=2, layer_types=layers("SF"))
    with Engine(network, cache_bytes=bytes_for(network, 50, **SETTINGS), **SETTINGS) as engine:
        engine._built.guest.forward = reads_what_it_sees  # type: ignore[method-assign]
        mix = Mix(engine)
        mix.wanted = [ear.answers() for ear in mix.play()]
        assert engine.stats().preemptions
        yield mix


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("kvcellar.engine", "kvcellar.engine.speculate"):
        monkeypatch.setattr(logging.getLogger(name), "disabled", True)


def texts_of(mix: Mix) -> list[tuple[int, ...]]:
    """What an oracle has to know of the mix: only how the texts go on."""
    return [tokens for answers in mix.wanted for tokens, _ in answers]


class Knowing(Oracle):
    """Knows the answers, behind whatever prompt."""

    def _after(self, chain: Any) -> tuple[int, ...]:
        produced = chain.samplers[0].produced
        own = tuple(chain.text[len(chain.text) - produced :]) if produced <= len(chain.text) else tuple(chain.text)
        return next((text[produced:] for text in self.texts if text[produced - len(own) : produced] == own), ())


@contextmanager
def transactions(engine: Engine) -> Iterator[list[bool]]:
    """For each transaction that raised before its commit: whether memory was as before it."""
    runner, memory, restored = engine._built.runner, engine._built.memory, list[bool]()
    really: Callable[..., Any] = runner._transact

    def transact(scheduled: Any) -> Any:
        feeds = runner._feeds
        before: list[Any] = []

        def fed(of: Any) -> Any:
            found = feeds(of)  # which may evict checkpoints
            before.append(everything(memory))
            return found

        runner._feeds = fed
        lengths = {seq: memory.length(seq) for seq in memory.sequences}
        try:
            return really(scheduled)
        except Exception:
            if before and lengths == {seq: memory.length(seq) for seq in memory.sequences}:
                restored.append(memory.step is None and everything(memory) == before[0])
            raise
        finally:
            runner._feeds = feeds

    with mock.patch.object(runner, "_transact", transact):
        yield restored


def test_a_mix_with_preemptions_and_shifts_is_as_without_drafts(mix: Mix) -> None:
    before = mix.engine.stats().preemptions
    speculates(mix.engine, drafter := Knowing(texts_of(mix)))
    ears = played(mix)
    assert [ear.answers() for ear in ears] == mix.wanted
    assert sum(drafter.rounds) > 0
    found = [ear.done.speculation for ear in ears]  # None of one that was preempted before each of its rounds
    assert sum(one.accepted for one in found if one is not None) > 10
    assert mix.engine.stats().preemptions > before
    assert_at_rest(mix.engine)


OF_DRAFTS = {  # what is lost is a draft
    "drafter": ["propose", "close", "fork"],
}
OF_A_STEP = {  # it is taken again, completion by completion and without drafts
    "runners": ["verify"],
    "memory": ["begin", "commit", "put", "get"],
    "guest": ["forward"],
    "runner": ["_transact", "_ready", "_draw", "_judged"],
    "completion": ["takes"],
    "drafting": ["chain"],
}
OF_THE_ENGINE = {  # it is at most one request's
    "runner": ["_emit", "_accept", "_keep", "_feeds"],
    "drafting": ["learn", "close", "fork", "report", "conclude"],
    "scheduler": ["_draft", "_add_drafts", "_make_free"],
    "completion": ["accept"],
}


def each(methods: dict[str, list[str]]) -> Any:
    return pytest.mark.parametrize(
        ("part", "name"), [(part, name) for part, names in methods.items() for name in names]
    )


def broken(monkeypatch: pytest.MonkeyPatch, mix: Mix, part: str, name: str, *, late: bool) -> Iterator[list[Ear]]:
    """The mix with drafts, where this raises at one call or another."""
    built, loop, fired = mix.engine._built, mix.engine._loop, 0
    for at in CALLS:
        drafter, fault = Knowing(texts_of(mix)), Fault(at, late)
        parts: dict[str, Any] = {
            "drafter": drafter, "runners": runners, "memory": built.memory, "guest": built.guest,
            "runner": built.runner, "completion": Completion, "drafting": loop.manager.drafting,
            "scheduler": loop.scheduler,
        }  # fmt: skip
        speculates(mix.engine, drafter)
        with monkeypatch.context() as patch, transactions(mix.engine) as restored:
            patch.setattr(parts[part], name, fault.wrap(getattr(parts[part], name)))
            ears = played(mix)
            mix.engine.stats()
        if (name, late) != ("begin", True):  # which leaves the step open, and the engine recovers
            assert all(restored), "memory was not as before the round"
        failed = [index for index, ear in enumerate(ears) if ear.error is not None]
        assert all(isinstance(ears[index].error, EngineFailed) for index in failed)
        for index, ear in enumerate(ears):
            assert index in failed or ear.answers() == mix.wanted[index]
        assert mix.engine.healthy
        assert not mix.engine._loop.manager.drafting._chains
        speculates(mix.engine, None)
        assert_at_rest(mix.engine)
        fired += fault.fired
        yield ears
        if not fault.fired:
            break
    assert fired, "it was never called"


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@each(OF_DRAFTS)
def test_an_error_of_the_drafter_costs_drafts(monkeypatch, mix, part, name, late) -> None:
    for ears in broken(monkeypatch, mix, part, name, late=late):
        assert not any(ear.error for ear in ears)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@each(OF_A_STEP)
def test_an_error_in_a_step_ends_one_request_at_most(monkeypatch, mix, part, name, late) -> None:
    for ears in broken(monkeypatch, mix, part, name, late=late):
        assert sum(ear.error is not None for ear in ears) <= 1


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@each(OF_THE_ENGINE)
def test_an_error_beside_a_step_ends_one_request_at_most(monkeypatch, mix, part, name, late) -> None:
    for ears in broken(monkeypatch, mix, part, name, late=late):
        assert sum(ear.error is not None for ear in ears) <= 1


# -- the ends of a text ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large() -> Iterator[Engine]:
    """Memory for everything; full and sliding layers."""
    network = ARCHS["ministral"].build(num_hidden_layers=2, layer_types=layers("SF"))
    with made(network, cache_bytes=4_000_000, context=48, step_tokens=16, max_sequences=8) as engine:
        engine._built.guest.forward = reads_what_it_sees  # type: ignore[method-assign]
        yield engine
        assert_at_rest(engine)


def plainly(engine: Engine, **how: Any) -> tuple[list[Ear], Rounds]:
    speculates(engine, None)
    with watched(engine) as rounds:
        return ask(engine, PROMPTS, **how), rounds


def drafted(engine: Engine, known: list[tuple[int, ...]], right: int | None, **how: Any) -> tuple[list[Ear], Rounds]:
    speculates(engine, Oracle(known, right))
    with watched(engine) as rounds:
        ears = ask(engine, PROMPTS, **how)
    engine.check()
    return ears, rounds


def outcome(ear: Ear) -> Any:
    """What a client sees, but for how events are cut."""
    choices = sorted(ear.reasons)
    said = [(ear.ids(choice), ear.text(choice), ear.logprobs(choice), ear.reasons[choice]) for choice in choices]
    return said, ear.done.usage


@pytest.fixture(scope="module")
def known(large: Engine) -> list[tuple[int, ...]]:
    ears, _ = plainly(large, max_tokens=24, **GREEDY)
    return told(PROMPTS, ears)


def assert_ends_alike(
    engine: Engine, known: list[tuple[int, ...]], *, rights: Sequence[int | None] = (4, 0, 2, None), **how: Any
) -> list[tuple[list[Ear], Rounds]]:
    """With all drafts right, none, and some: the same end, and the same in memory up to it."""
    ears, plain = plainly(engine, **how)
    found: list[tuple[list[Ear], Rounds]] = []
    for right in rights:
        again, rounds = drafted(engine, known, right, **how)
        assert [outcome(ear) for ear in again] == [outcome(ear) for ear in ears]
        if rounds.of_text:
            rounds.assert_as_in(plain)
        # Memory has all tokens but the last one, as in plain decoding, and never more.
        assert max(map(len, rounds.of_text), default=0) == max(map(len, plain.of_text), default=0)
        assert sum(rounds.kept) == sum(plain.kept)
        found.append((again, rounds))
    return found


@pytest.mark.parametrize("most", [1, 2, 3, 5, 6, 11])
def test_the_budget_is_reached_exactly(large: Engine, known, most: int) -> None:
    found = assert_ends_alike(large, known, max_tokens=most, **GREEDY)
    assert all((len(ear.ids()), ear.reasons[0]) == (most, "length") for ears, _ in found for ear in ears)
    drafts = [sum(done.drafted for ear in ears if (done := ear.done.speculation)) for ears, _ in found]
    assert (drafts[0] > 0) == (most > 2)  # the first token is the prompt's, and the last one needs none
    assert most > 2 or not any(drafts)


@pytest.mark.parametrize("place", range(6))
def test_an_accepted_end_of_text_ends_it_and_is_not_in_memory(large: Engine, known, place: int) -> None:
    """At each place of a round; drafts behind it are dropped, and no other token follows."""
    text, prompt = known[0], PROMPTS[0]
    end = text[len(prompt) + place]
    first = text.index(end, len(prompt))
    how = {"temperature": 0.0, "max_tokens": 24, "stop_token_ids": (end,)}
    (ears, rounds), *_ = assert_ends_alike(large, known, **how)
    assert (ears[0].ids(), ears[0].reasons[0]) == (text[len(prompt) : first], "stop")
    own = [of for of in rounds.of_text if of[: len(prompt)] == tuple(prompt)]
    assert max(map(len, own), default=len(prompt)) == first
    if place:  # the first token is the prompt's
        found = report(ears[0])
        assert found.accepted == found.drafted == sum(found.accepted_at) > 0


def test_the_context_is_filled_to_its_last_token(large: Engine) -> None:
    how = {"temperature": 0.0, "max_tokens": 100, "ignore_eos": True, "shift": False}
    ears, _ = plainly(large, **how)
    assert {len(prompt) + len(ear.ids()) for prompt, ear in zip(PROMPTS, ears, strict=True)} == {49}
    for again, _ in assert_ends_alike(large, told(PROMPTS, ears), **how):
        assert {ear.reasons[0] for ear in again} == {"length"}


def test_context_shifts_come_at_the_same_tokens(large: Engine) -> None:
    how = {"temperature": 0.0, "max_tokens": 95, "ignore_eos": True, "shift": True, "num_keep": 3}
    manager = large._built.loop.manager
    ears, _ = plainly(large, **how)
    before = manager.shifts
    (again, rounds), *_ = assert_ends_alike(large, told(PROMPTS, ears), rights=(4, None), **how)
    assert manager.shifts - before >= 3 * 2 * len(ears)
    assert max(rounds.kept) == 5
    assert report(again[0]).accepted > 40


def test_sampled_choices_with_a_seed_and_log_probabilities(large: Engine) -> None:
    how = {"temperature": 0.9, "seed": 3, "n": 2, "max_tokens": 14, "logprobs": 2, "ignore_eos": True}
    ears, _ = plainly(large, **how)
    found = assert_ends_alike(large, told(PROMPTS, ears), **how)
    assert sum(report(ear).accepted for ear in found[0][0]) > 20


class Recording(Oracle):
    """Remembers what it has proposed, by request: the position, and the drafts."""

    def __init__(self, texts: Sequence[tuple[int, ...]], right: int | None) -> None:
        super().__init__(texts, right)
        self.proposed: dict[int, list[tuple[int, list[int]]]] = {}

    def propose(self, chains: Sequence[Any]) -> None:
        super().propose(chains)
        for chain in chains:
            self.proposed.setdefault(chain.key[0], []).append((chain.pos, chain.tokens))


@pytest.mark.parametrize("right", [0, 2, 4, None])
def test_the_report_of_a_request_counts_what_was_proposed_and_what_the_text_has(large: Engine, known, right) -> None:
    speculates(large, drafter := Recording(known, right))
    with watched(large) as rounds:
        ears = ask(large, PROMPTS, max_tokens=17, **GREEDY)
    for prompt, ear, proposed in zip(PROMPTS, ears, [of for _, of in sorted(drafter.proposed.items())], strict=True):
        text, found = (*prompt, *ear.ids()), report(ear)
        good = [next((i for i, t in enumerate(of) if text[at + i] != t), len(of)) for at, of in proposed]
        tried = [min(len(of), count + 1) for (_, of), count in zip(proposed, good, strict=True)]
        most = max(tried)
        assert found.drafted == sum(len(of) for _, of in proposed)
        assert found.accepted == sum(good) == sum(found.accepted_at)
        assert found.tried_at == tuple(sum(count > place for count in tried) for place in range(most))
        assert found.accepted_at == tuple(sum(count > place for count in good) for place in range(most))
        # The first token is the prompt's; every round has given one and the accepted drafts.
        assert found.rounds == 17 - 1 - found.accepted
        assert len(found.depths) == min(8, found.rounds)
        assert max(deepest for _, deepest in found.depths) == max(len(of) for _, of in proposed)
    assert len(rounds.kept) == sum(report(ear).rounds for ear in ears)


@pytest.mark.parametrize("at", [2, 3, 5])
@pytest.mark.parametrize("right", [4, 0, None])
def test_a_cancel_between_forward_and_commit_ends_one_request(large: Engine, known, at: int, right) -> None:
    """The step is kept or not, for the others it is as if there had been no cancel."""
    forward, loop, calls = large._built.guest.forward, large._loop, count(1)

    def cancelling(*args: Any) -> Any:
        made = forward(*args)
        if next(calls) == at:
            loop.cancel(min(loop._requests))
        return made

    with mock.patch.object(large._built.guest, "forward", cancelling):
        ears, rounds = drafted(large, known, right, max_tokens=24, **GREEDY)
    assert [ear.reasons[0] for ear in ears] == ["cancelled", "length", "length"]
    for prompt, ear, text in zip(PROMPTS, ears, known, strict=True):
        assert (*prompt, *ear.ids()) == text[: len(prompt) + len(ear.ids())]
    assert [len(ear.ids()) for ear in ears[1:]] == [24, 24]
    assert all(text == full[: len(text)] for text in rounds.of_text for full in known if text[:1] == full[:1])
    assert_at_rest(large)


@pytest.mark.parametrize("at", [2, 4, 7])
def test_a_client_that_is_gone_inside_of_accepted_drafts_ends_one_request(large: Engine, known, at: int) -> None:
    """Its receiver raises; no other event is delivered, and nothing of it is left."""
    speculates(large, Oracle(known, 4))
    heard, others = list[Event](), [Ear(), Ear()]

    def gone(event: Event) -> None:
        heard.append(event)
        if len(heard) == at:
            raise ConnectionError("closed")

    large.clear_cache()
    with held(large):
        for prompt, deliver in zip(PROMPTS, (gone, *others), strict=True):
            large.submit(prompt, SamplingParams(max_tokens=24, **GREEDY), deliver=deliver)
    for prompt, ear, text in zip(PROMPTS[1:], others, known[1:], strict=True):
        assert (*prompt, *ear.wait().ids()) == text
    assert len(heard) == at
    assert_at_rest(large)
