"""What is too long is refused in the same way however it comes, and prompts under way take bounded memory."""

from collections.abc import Iterator

import numpy
import pytest

from kvcellar import Engine
from kvcellar.engine.arguments import prompt_ids
from kvcellar.engine.core.intake import COPY_BYTES, TOKEN_BYTES, PromptMemory
from kvcellar.engine.load.settings import LEAST_TEXT_BYTES, MOST_TEXT_BYTES, Settings, text_bytes_of
from kvcellar.errors import BadRequest, EngineClosed, Overloaded, PromptTooLong, shown
from kvcellar.events import Event

CONTEXT = 64


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine(device="cpu", cache_bytes=16_000_000, context=CONTEXT, max_sequences=4, threads=1) as engine:
        yield engine


def hear(event: Event) -> None:
    """Nothing is done with it."""


HUGE = "\n" * 1_000_000
TOO_LONG = {
    "text": lambda engine: engine.generate(HUGE, max_tokens=1),
    "texts": lambda engine: engine.generate([HUGE, "a"], max_tokens=1),
    "a stream": lambda engine: list(engine.stream(HUGE, max_tokens=1)),
    "a session": lambda engine: engine.session(chat=False).send(HUGE, max_tokens=1),
    "ids": lambda engine: engine.generate([5] * 1_000_000, max_tokens=1),
    "a conversation": lambda engine: engine.chat([{"role": "user", "content": HUGE[:500_000]}], max_tokens=1),
    "encode with a limit": lambda engine: engine.encode(HUGE, limit=CONTEXT),
    "render with a limit": lambda engine: engine.render([{"role": "user", "content": HUGE[:500_000]}], limit=CONTEXT),
}


@pytest.mark.parametrize("ask", TOO_LONG.values(), ids=TOO_LONG.keys())
def test_what_cannot_fit_is_refused_without_being_tokenized(engine, ask, monkeypatch) -> None:
    if engine.model.has_chat is False and "messages" in ask.__code__.co_names:
        pytest.skip("the model has no template")
    words = engine._codec._tokenizer
    monkeypatch.setattr(words, "_tokenizer", None)
    with pytest.raises(PromptTooLong) as refused:
        ask(engine)
    assert (refused.value.param, refused.value.limit) == ("prompt", CONTEXT)


def test_a_text_of_the_longest_tokens_is_taken(engine) -> None:
    longest = engine._codec._tokenizer.longest
    blanks = (" " * longest + "\n") * (CONTEXT // 2 - 1)  # one token is for the beginning of the text, and one is drawn
    assert engine.generate(blanks, max_tokens=1).usage.prompt_tokens == CONTEXT - 1


def test_a_text_may_be_tokenized_without_a_limit(engine) -> None:
    assert len(engine.encode("a\n" * 4 * CONTEXT, special=False)) == 8 * CONTEXT


@pytest.mark.parametrize(
    "ids",
    [(3, 4, 5), [3, 4, 5], numpy.array([3, 4, 5]), [numpy.int32(3), 4, numpy.int64(5)]],
    ids=lambda ids: str(type(ids)),
)
def test_token_ids_may_be_any_whole_numbers(engine, ids) -> None:
    found = prompt_ids(ids, vocab_size=engine.model.vocab_size, context=CONTEXT)
    assert found == (3, 4, 5)
    assert all(type(token) is int for token in found)


@pytest.mark.parametrize(
    "wrong", [True, 1.0, "3", None, -1, 10**6, 10**5000, [3], numpy.float32(3)], ids=lambda wrong: str(type(wrong))
)
@pytest.mark.parametrize("at", [0, 1, 63])
def test_a_token_that_is_none_is_named_and_the_message_is_short(engine, wrong, at) -> None:
    ids = [3] * 64
    ids[at] = wrong
    with pytest.raises(BadRequest, match="is not a token id") as refused:
        prompt_ids(ids, vocab_size=engine.model.vocab_size, context=CONTEXT)
    assert shown(wrong) in str(refused.value)
    assert len(str(refused.value)) < 300


@pytest.mark.parametrize(
    "value",
    ["x" * 10**6, [1] * 10**6, {n: n for n in range(10**5)}, [[10**9999]] * 99, 10**9999],
    ids=["text", "list", "dict", "nested", "number"],
)
def test_what_is_shown_in_a_message_is_short(value) -> None:
    assert len(shown(value)) < 300


def test_prompts_take_memory_until_their_requests_are_over(engine) -> None:
    prompts = engine._built.intake.prompts
    params = engine.params(max_tokens=10**6, shift=True, ignore_eos=True, n=2)
    ticket = engine.submit([3] * 10, params, deliver=hear)
    assert prompts.taken == 10 * (TOKEN_BYTES + 2 * COPY_BYTES)
    ticket.cancel()
    engine.stats()  # after the cancel
    assert prompts.taken == 0
    engine.generate([[3, 4]] * 5, max_tokens=2)
    with pytest.raises(BadRequest):
        engine.submit([3], engine.params(n=2, stop=("a",)), deliver=hear, checkpoint_positions=[9])
    assert prompts.taken == 0


def test_more_prompts_than_there_is_memory_for_are_refused_until_others_end(engine, monkeypatch) -> None:
    params = engine.params(max_tokens=10**6, shift=True, ignore_eos=True)
    monkeypatch.setattr(engine._built.intake.prompts, "most", 25 * (TOKEN_BYTES + COPY_BYTES))
    first = engine.submit([3] * 20, params, deliver=hear)
    with pytest.raises(Overloaded, match="for prompts; try again later"):
        engine.generate([3] * 6, max_tokens=1)
    assert engine.generate([3] * 5, max_tokens=1).token_ids
    with pytest.raises(BadRequest, match="half of text_bytes"):
        engine.generate([3] * 26, max_tokens=1)
    first.cancel()
    engine.stats()
    assert engine.generate([3] * 25, max_tokens=1).token_ids


def test_a_closed_engine_keeps_no_prompt() -> None:
    engine = Engine(device="cpu", cache_bytes=16_000_000, context=CONTEXT, threads=1)
    engine.submit([3] * 10, engine.params(max_tokens=50, ignore_eos=True), deliver=hear)
    engine.close()
    with pytest.raises(EngineClosed):
        engine.submit([3] * 10, engine.params(), deliver=hear)
    assert engine._built.intake.prompts.taken == 0


def test_what_is_taken_is_counted_once() -> None:
    prompts = PromptMemory(1000)
    with pytest.raises(BadRequest, match=r"images of the prompt take 990 bytes .* 1000 are for prompts. Send fewer"):
        prompts.take(10, 1, images=990)
    with pytest.raises(BadRequest, match="Shorten the prompt, or lower n"):
        prompts.take(100, 1, images=9)
    size = prompts.take(5, 1)
    prompts.give(size)
    with pytest.raises(AssertionError, match="twice"):
        prompts.give(size)


@pytest.mark.parametrize("context", [1, 2048, 131_072, 10**7])
def test_memory_for_texts_follows_the_context(context: int) -> None:
    assert LEAST_TEXT_BYTES <= text_bytes_of(Settings(), context) <= MOST_TEXT_BYTES
    assert text_bytes_of(Settings(text_bytes=LEAST_TEXT_BYTES), context) == LEAST_TEXT_BYTES
    with pytest.raises(BadRequest, match="text_bytes"):
        Settings(text_bytes=LEAST_TEXT_BYTES - 1)
