"""Every argument of every public function, wrong in every way, is refused as ours or works; no other request fails."""

import enum
import math
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar import Engine, KvcellarError, SamplingParams
from kvcellar.engine.load.settings import Settings
from kvcellar.errors import BadRequest, PromptTooLong, shown
from kvcellar.memory.plan import Batch, Feed
from kvcellar.memory.spans import Span
from tests.engine.mixes import Ear, assert_at_rest
from tests.zoo import ARCHS

HOW = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True}


class Mute:
    """Has no repr, and is equal to nothing without an error."""

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equality")


class Liar(int):
    """An int that says of itself what it likes."""

    def __eq__(self, other: object) -> bool:
        return True

    def __lt__(self, other: object) -> bool:
        return True

    def __le__(self, other: object) -> bool:
        return True

    def __ge__(self, other: object) -> bool:
        return True

    def __gt__(self, other: object) -> bool:
        return True

    def __hash__(self) -> int:
        return 7

    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class Text(str):
    """A str of a class of its own."""

    __slots__ = ()


class Colour(enum.IntEnum):
    RED = 1


class Endless(Sequence[int]):
    """Says that it has three items, and has always one more."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: Any) -> Any:
        return 5


JUNK: list[Any] = [
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, 2**64, 10**5000, -(10**5000), 0.0, 1.5, -0.0, 1e300, math.nan,
    math.inf, -math.inf, 1j, "", "x", "\ud800", "1", b"x", (), [], {}, set(), object(), Mute(), [Mute()], Liar(5),
    Liar(-5), Liar(10**30), [Liar(-3)], Text("x"), Colour.RED, [Colour.RED], np.int64(3), np.float64(0.5),
    np.bool_(True), np.array([1, 2]), torch.tensor(1), torch.tensor([1.0]), [None], [1.5], [[1]], ["a", 1], {"a": 1},
    {1: "a"}, {1: math.nan}, {Liar(5): 1.0}, [10**5000], len, Endless(), iter([1]), range(3), "x" * 5000,
    [{"role": "user"}], [{"role": Mute()}], [{"role": "user", "content": 5}], [{"role": "user", "content": [Mute()]}],
]  # fmt: skip
SOMETHING = st.sampled_from(JUNK)


@pytest.fixture(scope="module")
def embedded():
    with Engine(cache_bytes=4_000_000, context=64) as made:
        yield made


@pytest.fixture(scope="module")
def recurrent():
    with Engine(ARCHS["lfm2"].build(), cache_bytes=4_000_000) as made:
        yield made


@pytest.fixture(scope="module")
def llama():
    with Engine(ARCHS["llama"].build(num_hidden_layers=1), cache_bytes=4_000_000) as made:
        yield made


def plain(value: Any) -> bool:
    """Made of nothing of the caller's own."""
    if isinstance(value, tuple):
        return type(value) is tuple and all(map(plain, value))
    return value is None or type(value) in (int, float, bool, str)


def tried(call: Callable[[], Any]) -> Any:
    """What it returns; None if it raises an error of ours. Any other is the test's."""
    try:
        return call()
    except KvcellarError:
        return None


@pytest.mark.parametrize("field", [field.name for field in fields(SamplingParams)])
def test_a_sampling_parameter_is_refused_or_becomes_plain(field) -> None:
    more = {"max_tokens": 3} if field == "shift" else {}
    for value in JUNK:
        made = tried(lambda value=value: SamplingParams(**{field: value}, **more))
        if made is not None:
            kept = getattr(made, field)
            assert plain(tuple(kept.items()) if field in ("logit_bias", "sequence_bias") else kept), value
            assert replace(made) == made


@pytest.mark.parametrize("field", [field.name for field in fields(Settings)])
def test_a_setting_is_refused_or_plain(field) -> None:
    for value in JUNK:
        made = tried(lambda value=value: Settings(**{field: value}))
        kept = getattr(made, field, None)
        kept = tuple(kept.items()) if field == "adapters" and kept is not None else kept
        assert isinstance(kept, str) or plain(kept) or (field == "draft" and callable(kept)), value


@pytest.mark.parametrize("field", [field.name for field in fields(SamplingParams)])
def test_parameters_that_were_changed_behind_their_back_are_checked_again(llama, field) -> None:
    for value in (None, True, math.nan, 10**5000, "x", [Mute()], Liar(1), Liar(10**30), (1, [2]), {1: Liar(3)}):
        params = SamplingParams(**HOW)
        object.__setattr__(params, field, value)
        ear = Ear()
        ticket = tried(lambda params=params, ear=ear: llama.submit([5, 6], params, deliver=ear))
        if ticket is not None:
            ticket.cancel()
            assert ear.wait().error is None
    assert llama.healthy


@settings(max_examples=max(20, settings.default.max_examples // 2))
@given(st.data())
def test_whatever_is_submitted_is_refused_or_answered(recurrent, data) -> None:
    good: dict[str, Any] = {
        "prompt_ids": [5, 6, 7], "params": SamplingParams(**HOW), "deliver": Ear(),
        "session": None, "checkpoint_positions": [1, 3],
    }  # fmt: skip
    bad = data.draw(st.sampled_from(sorted(good)))
    value = data.draw(SOMETHING)
    given_args = {**good, bad: value}
    ticket = tried(lambda: recurrent.submit(given_args.pop("prompt_ids"), given_args.pop("params"), **given_args))
    if ticket is not None:
        ticket.cancel()
        if bad != "deliver":
            assert good["deliver"].wait().error is None
    assert len(recurrent.generate([5, 6], **HOW).token_ids) == 2
    recurrent.check()


@settings(max_examples=max(8, settings.default.max_examples // 4))
@given(SOMETHING, SOMETHING)
def test_no_public_function_raises_what_is_not_ours(embedded, value, other) -> None:
    engine = embedded
    with engine.session() as session, engine.session(chat=False) as text:
        for call in (
            lambda: engine.encode(value), lambda: engine.encode("x", special=value), lambda: engine.decode(value),
            lambda: engine.token_bytes(value), lambda: engine.written(value), lambda: engine.generate(value, **HOW),
            lambda: engine.generate([value, other], **HOW), lambda: list(engine.stream(value, **HOW)),
            lambda: engine.generate("x", **{**HOW, "n": value}), lambda: engine.generate("x", **{**HOW, "stop": value}),
            lambda: session.send(value, **HOW), lambda: text.send(value, **HOW),
            lambda: list(text.stream(value, **HOW)), lambda: engine.render(value),
            lambda: text.send("x", **{**HOW, "logit_bias": value}), lambda: text.rewind(value),
            lambda: engine.render([{"role": "user", "content": "a"}], variables=value, effort=other),
        ):  # fmt: skip
            tried(call)
    assert len(engine.generate("import", **HOW).token_ids) == 2
    assert_at_rest(engine)


@given(SOMETHING, SOMETHING)
def test_a_span_and_a_batch_are_refused_or_of_plain_numbers(start, end) -> None:
    for make in (
        lambda: Span(start, end), lambda: Batch(start),
        lambda: Batch((start, end)), lambda: Batch((Feed(start, Span(0, 1)),)), lambda: Batch((Feed(0, end),)),
    ):  # fmt: skip
        made = tried(make)
        if isinstance(made, Span):
            assert plain((made.start, made.end))
        elif made is not None:
            assert all(plain((feed.seq, feed.pos.start, feed.pos.end)) for feed in made.feeds)


def test_a_value_is_shown_in_few_words_whatever_it_is() -> None:
    for value in JUNK:
        assert 0 < len(shown(value)) < 260


def test_a_prompt_that_is_too_long_is_refused_before_it_is_copied(recurrent) -> None:
    with pytest.raises(PromptTooLong):
        recurrent.generate(range(10**15))


def test_an_option_of_a_request_that_there_is_not_is_refused_by_name(recurrent) -> None:
    with pytest.raises(BadRequest, match=r"no option 'break_points'.*'breakpoints'") as refused:
        recurrent.submit([1, 2], recurrent.params(max_tokens=1), deliver=print, break_points=(1,))
    assert refused.value.param == "break_points"


@pytest.mark.parametrize(
    ("posted", "taken_in"), [(False, False), (True, False), (True, True)], ids=["not posted", "posted", "taken in"]
)
def test_an_interrupt_of_a_submission_gives_back_what_it_holds_once(llama, monkeypatch, posted, taken_in) -> None:
    """Given back twice, the memory of prompts would be counted as less than is taken, and an adapter freed under a
    request."""
    loop, prompts, held = llama._loop, llama._built.intake.prompts, threading.Event()
    submit, seen = loop.submit, list[Any]()

    def interrupted(request: Any, completions: Any) -> None:
        seen.append(request)
        if not taken_in:
            loop.post(held.wait)  # nothing is taken in meanwhile
        if posted:
            submit(request, completions)
        if taken_in:
            llama.stats()  # is answered after the request was taken in
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(loop, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llama.submit([5] * 20, SamplingParams(max_tokens=500, ignore_eos=True), deliver=lambda event: None)
    held.set()
    assert len(llama.generate([7] * 4, **HOW).token_ids) == 2
    while loop.backlog or (taken_in and not seen[0].done):
        time.sleep(0.005)
    assert prompts.taken == 0
    assert_at_rest(llama)
