"""The text of an answer: where it ends, in which pieces it comes, and what is told about each of its tokens."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvcellar import EngineFailed
from kvcellar.engine.control.count_stats import stats as stats_of
from kvcellar.memory.prefix.node import key_of
from kvcellar.sampling_params import SamplingParams
from kvcellar.text.output import ByteStream, _Table
from tests.engine.mixes import Ear, assert_at_rest, judge, small_engine
from tests.engine.speculating import Oracle, speculates
from tests.engine.spoken import Spoken
from tests.zoo import reference_logits

TEXTS = st.text(st.sampled_from("aab é你👩\u200d🔬\n"), min_size=1, max_size=12)


@pytest.fixture(scope="module")
def spoken(tmp_path_factory):
    made = Spoken(tmp_path_factory.mktemp("model"))
    with made.engine:
        yield made
        assert_at_rest(made.engine)


@st.composite
def stops(draw):
    """A text, and strings that may be in it."""
    text = draw(TEXTS)
    a = draw(st.integers(0, len(text) - 1))
    inside = text[a : draw(st.integers(a + 1, len(text)))]
    return text, draw(st.lists(st.one_of(st.just(inside), TEXTS), min_size=1, max_size=3))


def obvious_cut(text, strings):
    """Where the first stop string that becomes complete begins; the longest, if several do at once."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in strings if text[:end].endswith(stop)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


# -- stop strings -----------------------------------------------------------------------------------------------------


@given(stops(), st.booleans())
def test_an_answer_ends_where_a_stop_string_begins_however_its_tokens_lie(spoken, made, bytewise):
    text, strings = made
    script = spoken.bytewise(text) if bytewise else spoken.wordwise(text)
    result = spoken.say(script, stop=strings)
    wanted, met = obvious_cut(text, strings)
    assert result.text == wanted
    assert result.choices[0].stop_string == met
    assert result.finish_reason == "stop"
    assert list(result.token_ids) == script[: len(result.token_ids)]
    assert spoken.engine.decode(result.token_ids).startswith(wanted)


@given(TEXTS, st.booleans(), st.integers(1, 40))
def test_pieces_are_the_text_and_never_end_inside_a_character(spoken, text, bytewise, max_tokens):
    spoken.script = spoken.bytewise(text) if bytewise else spoken.wordwise(text)
    pieces = list(spoken.engine.stream([spoken.first], temperature=0.0, max_tokens=max_tokens))
    told = "".join(piece.text for piece in pieces)
    whole = spoken.engine.decode(spoken.script[:max_tokens])
    assert told == whole
    assert tuple(token for piece in pieces for token in piece.token_ids) == tuple(spoken.script[:max_tokens])
    if max_tokens >= len(spoken.script):
        assert told == text
        assert not any("\ufffd" in piece.text for piece in pieces)
    else:  # only the very end may be half a character
        assert not any("\ufffd" in piece.text for piece in pieces[:-1])


def test_an_answer_that_is_cut_inside_a_character_says_so_at_its_end(spoken):
    script = spoken.bytewise("a你")
    result = spoken.say(script, max_tokens=3)
    assert (result.text, result.finish_reason) == ("a\ufffd", "length")
    assert result.text == spoken.engine.decode(result.token_ids)


def test_text_that_might_have_become_a_stop_string_is_told_when_it_did_not(spoken):
    assert spoken.say(spoken.wordwise("a b a"), stop=["a b a c"]).text == "a b a"
    assert spoken.say(spoken.wordwise("a b a"), stop=["a b a c"], max_tokens=2).finish_reason == "length"


def test_a_stop_string_that_memory_or_length_completes_counts(spoken):
    script = spoken.bytewise("abcd")
    result = spoken.say(script, stop="cd", max_tokens=4)
    assert (result.text, result.finish_reason) == ("ab", "stop")


def test_one_stop_string_may_be_said_without_a_list(spoken):
    script = spoken.bytewise("abcd")
    assert spoken.say(script, stop="c").text == spoken.say(script, stop=["c"]).text == "ab"


@pytest.mark.parametrize("drafts", [0, 6])
def test_the_engine_draws_no_more_when_a_text_has_ended(spoken, drafts):
    """A stop string ends the completion in the engine, too, which remembers what was told, also where drafts behind the
    stop string were accepted with it."""
    loop, script = spoken.engine._loop, spoken.bytewise("abcd" * 20)
    before = loop.steps
    speculates(spoken.engine, Oracle([(spoken.first, *script)], drafts) if drafts else None, depth=drafts)
    result = spoken.say(script, stop="cd", max_tokens=80)
    speculates(spoken.engine, None)
    assert (result.text, result.finish_reason) == ("ab", "stop")
    assert loop.steps - before <= 6
    last = next(iter(loop.last))
    text = key_of([spoken.first]), key_of(result.token_ids)
    assert (last.usage, last.outcome, last.text) == (result.usage, "stop", text)


def test_an_error_of_a_text_ends_its_request_and_frees_what_it_had(spoken, monkeypatch):
    script, push = spoken.bytewise("abx" * 20), ByteStream.push

    def broken(stream: ByteStream, token: int) -> str:
        if token == script[2]:
            raise UnicodeError("a tokenizer that cannot read its own token")
        return push(stream, token)

    monkeypatch.setattr(ByteStream, "push", broken)
    with pytest.raises(EngineFailed, match="cannot read its own token"):
        spoken.say(script, n=2, max_tokens=60)
    assert next(iter(spoken.engine._loop.last)).outcome == "EngineFailed"
    assert_at_rest(spoken.engine)
    assert spoken.say(script[:2]).text == "ab"


# -- ends -------------------------------------------------------------------------------------------------------------


def test_end_of_text_ends_and_is_not_told(spoken):
    script = spoken.wordwise("user")
    result = spoken.say(script)
    assert (result.text, result.finish_reason, list(result.token_ids)) == ("user", "stop", script)
    assert result.usage.completion_tokens == len(script) + 1  # the end was drawn, too
    assert result.choices[0].stop_string is None


def test_stop_ids_end_and_are_not_told(spoken):
    script = spoken.bytewise("abcd")
    result = spoken.say(script, stop_token_ids=[script[2]])
    assert (result.text, result.finish_reason, list(result.token_ids)) == ("ab", "stop", script[:2])


def test_ignoring_end_of_text_goes_past_it_but_not_past_stop_ids_and_strings(spoken):
    a, b = spoken.bytewise("ab")
    script = [a, spoken.end, b, spoken.end, a]
    assert spoken.say(script, ignore_eos=True, max_tokens=5).token_ids == tuple(script)
    assert spoken.say(script, ignore_eos=True, max_tokens=5).text == "aba"
    assert spoken.say(script, ignore_eos=True, stop_token_ids=[b]).token_ids == tuple(script[:2])
    assert spoken.say(script, ignore_eos=True, stop="b").text == "a"
    assert spoken.say(script).token_ids == (a,)


def test_the_least_number_of_tokens_is_written_whatever_wants_to_end(spoken):
    a, b = spoken.bytewise("ab")
    for ends in ({}, {"stop_token_ids": [b]}):
        result = spoken.say([a, spoken.end, spoken.end, b], min_tokens=3, max_tokens=6, **ends)
        assert result.usage.completion_tokens >= 3
        assert spoken.end not in result.token_ids[:3]
    result = spoken.say([a, b, a, b, a], min_tokens=3, stop="b", max_tokens=5)
    assert (result.text, result.finish_reason) == ("aba", "stop")


@pytest.mark.parametrize("ending", ["length", "stop"])
def test_one_token(spoken, ending):
    a, b = spoken.bytewise("ab")
    result = spoken.say([a if ending == "length" else spoken.end, b], max_tokens=1)
    assert result.finish_reason == ending
    assert result.text == ("a" if ending == "length" else "")
    assert result.usage.completion_tokens == 1
    assert result.timings.decoding == 0
    assert result.timings.tokens_per_second(1) == 0
    assert replace(result.timings, decoding=4.0).tokens_per_second(2) == 0.25


@pytest.mark.parametrize("kind", ["llama_like", "gemma_like", "metaspace", "wordpiece", "strange"])
def test_pieces_are_the_text_of_the_whole_for_every_kind_of_tokenizer(tmp_path, kind):
    spoken = Spoken(tmp_path, kind)
    with spoken.engine as engine:
        script = spoken.wordwise("nothing in it is forgotten, 你好 and 😀")
        spoken.script = script
        pieces = list(engine.stream([spoken.first], temperature=0.0))
        assert "".join(piece.text for piece in pieces) == engine.decode(script)
        assert tuple(token for piece in pieces for token in piece.token_ids) == tuple(script)


def test_a_text_that_is_continued_keeps_the_space_between(tmp_path):
    """The tokenizer drops the space of a text's first word, but an answer's first word is not that."""
    spoken = Spoken(tmp_path, "llama_like")
    with spoken.engine as engine:
        prompt, rest = engine.encode("the cellar"), spoken.wordwise("is cool")
        spoken.script = [0] * (len(prompt) - 1) + rest
        result = engine.generate("the cellar", temperature=0.0)
        assert list(result.token_ids) == rest
        assert "the cellar" + result.text == engine.decode([*prompt, *rest]) == "the cellar is cool"


# -- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("top", [0, 1, 5, 20])
def test_every_token_has_its_logprob_and_the_best_beside_it(top):
    prompt = [5, 6, 7]
    with small_engine("llama") as engine:
        asked = {"max_tokens": 9, "n": 2, "seed": 4, "temperature": 0.7, "top_k": 5, "ignore_eos": True}
        result = engine.generate(prompt, logprobs=top, **asked)
        silent = engine.generate(prompt, **asked)
    assert [c.token_ids for c in silent.choices] == [c.token_ids for c in result.choices]
    assert silent.logprobs is None
    for choice in result.choices:
        logits = reference_logits(judge("llama"), [*prompt, *choice.token_ids])[len(prompt) - 1 : -1]
        wanted = logits.double().log_softmax(-1)
        assert [entry.token_id for entry in choice.logprobs] == list(choice.token_ids)
        for row, entry in zip(wanted, choice.logprobs, strict=True):
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=2e-3)
            assert [value for _, value in entry.top] == pytest.approx(row.topk(top).values.tolist(), abs=2e-3)
            assert len({token for token, _ in entry.top}) == len(entry.top) == top
            for token, value in entry.top:
                assert value == pytest.approx(float(row[token]), abs=2e-3)


def test_an_answer_that_ends_with_its_first_token_has_no_logprobs_where_they_were_requested():
    with small_engine("llama") as engine:
        first = engine.generate([5, 6, 7], max_tokens=1, temperature=0.0, ignore_eos=True).token_ids
        asked = {"max_tokens": 9, "temperature": 0.0, "stop_token_ids": list(first)}
        for wanted, expected in ((2, ()), (None, None)):
            result = engine.generate([5, 6, 7], logprobs=wanted, **asked)
            assert (result.token_ids, result.logprobs, result.finish_reason) == ((), expected, "stop")
            stream = engine.stream([5, 6, 7], logprobs=wanted, **asked)
            assert list(stream) == []
            assert stream.result.logprobs == expected


@given(TEXTS, st.booleans())
@settings(max_examples=20)
def test_logprobs_lie_with_their_tokens_whatever_is_held_back(spoken, text, bytewise):
    spoken.script = spoken.bytewise(text) if bytewise else spoken.wordwise(text)
    ear = Ear()
    params = SamplingParams(temperature=0.0, logprobs=1, stop=("aaaa", "é你"))
    spoken.engine.submit([spoken.first], params, deliver=ear)
    ear.wait()
    for piece in ear.pieces():
        assert piece.logprobs is not None
        assert [entry.token_id for entry in piece.logprobs] == list(piece.token_ids)
        for entry in piece.logprobs:
            assert entry.top == ((entry.token_id, entry.logprob),)
            assert torch.tensor(entry.logprob).exp() > 0.99


# -- what it cost -----------------------------------------------------------------------------------------------------


def test_usage_counts_and_times_are_in_order():
    with small_engine("llama", max_sequences=1) as engine:
        results = engine.generate([[5, 6, 7], [8]], max_tokens=5, ignore_eos=True, n=1)
        for result, length in zip(results, (3, 1), strict=True):
            assert (result.usage.prompt_tokens, result.usage.cached_tokens) == (length, 0)
            assert result.usage.completion_tokens == len(result.token_ids) == 5
            times = result.timings
            assert 0 <= times.queued <= times.first_token
            assert times.decoding > 0
            assert times.tokens_per_second(5) == pytest.approx(4 / times.decoding)
        many = engine.generate([5], max_tokens=4, ignore_eos=True)
        assert many.usage.completion_tokens == 4


def test_usage_of_several_answers_counts_all_of_them():
    with small_engine("llama") as engine:
        result = engine.generate([5, 6], max_tokens=4, ignore_eos=True, n=3)
        assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (2, 12)
        assert [choice.index for choice in result.choices] == [0, 1, 2]
        first = result.choices[0]
        assert (result.text, result.token_ids) == (first.text, first.token_ids)


def test_a_preempted_request_does_not_call_its_own_work_remembered():
    from tests.engine.mixes import bytes_for

    with small_engine("llama", cache_bytes=bytes_for("llama", 40)) as engine:
        results = engine.generate([[5 + i] * 12 for i in range(4)], max_tokens=20, n=2, ignore_eos=True)
        assert engine.stats().preemptions > 0
        assert [result.usage.cached_tokens for result in results] == [0] * 4


# -- sharing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "bloom"])
def test_samples_of_a_prompt_share_its_cells(name):
    """n answers hold the prompt once, and what each wrote itself."""
    prompt, n, seen = [3 + i % 90 for i in range(60)], 8, []
    with small_engine(name) as engine:
        turn = engine._loop._step

        def watch():
            turn()
            if len(engine._loop.scheduler.running) == n:
                completions = engine._loop.scheduler.running
                seen.append((sum(one.computed - len(prompt) for one in completions), stats_of(engine._built)))

        engine._loop._step = watch
        result = engine.generate(prompt, n=n, max_tokens=5, seed=2, temperature=1.0, ignore_eos=True)
        assert len({choice.token_ids for choice in result.choices}) > 1
    assert len(seen) == 4  # before each token but the last
    for written, stats in seen:
        for group in stats.groups:
            if group.name.startswith("sliding"):
                assert group.used <= 8 + n * 8
            else:
                assert group.used == len(prompt) + written


@pytest.mark.parametrize("name", ["llama", "bloom"])
def test_samples_are_what_each_would_be_without_the_others(name):
    asked = {"max_tokens": 10, "seed": 5, "temperature": 1.0, "ignore_eos": True}
    with small_engine(name) as engine:
        many = engine.generate([5, 6, 7], n=4, **asked)
        fewer = engine.generate([5, 6, 7], n=2, **asked)
    with small_engine(name, step_tokens=2, max_sequences=4) as other:
        again = other.generate([5, 6, 7], n=4, **asked)
    assert [c.token_ids for c in many.choices] == [c.token_ids for c in again.choices]
    assert [c.token_ids for c in many.choices][:2] == [c.token_ids for c in fewer.choices]


def test_the_tables_of_stop_strings_are_made_once_for_all_answers_of_a_request(spoken, monkeypatch):
    made = []
    real = _Table.__init__
    monkeypatch.setattr(_Table, "__init__", lambda self, text: (made.append(text), real(self, text))[1])
    result = spoken.say([*[spoken.first], *spoken.wordwise("ab")], n=6, stop=["ab", "zz"], max_tokens=4)
    assert len(result.choices) == 6
    assert sorted(made) == ["ab", "zz"]
