"""What an engine does beside prompts and greedy texts, with images in the text: each text is that of the network's own
forward, and warm is cold."""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from kvcellar import Engine
from kvcellar.engine.models.guest import Guest
from kvcellar.engine.models.registered import our_attention, own_attention
from kvcellar.engine.speculate.chain import Key
from kvcellar.engine.speculate.drafter import Committed
from kvcellar.errors import AdapterRefused
from kvcellar.frontend.result import Result
from kvcellar.images.image import is_row
from tests.engine.mixes import assert_at_rest, bytes_for
from tests.engine.speculating import Oracle, Silent, speculates
from tests.images.seeing import Pictures, asked, engine_of, pictures_of
from tests.models.lora import layers_of, merged, saved
from tests.zoo import ARCHS
from tests.zoo_test_support.images import PLACEHOLDER, network_of

QUICK = ("gemma3", "qwen3_vl")
SLOW = ("llava", "qwen2_vl", "lfm3_vl", "mistral3", "qwen3_5", "idefics3", "vipllava", "mllama")
TYPES = [*QUICK, *(pytest.param(one, marks=pytest.mark.slow) for one in SLOW)]
BEFORE, BETWEEN, AFTER = [5, 6, 7, 8, 31], [9, 10, 11], [12, 13, 14, 15]
CLOSE = 1e-4


def ids_of(result: Result) -> list[tuple[int, ...]]:
    return [choice.token_ids for choice in result.choices]


def encoded(engine: Engine) -> int:
    """How often an image went through the tower."""
    seeing = engine._built.loop.manager.seeing
    assert seeing is not None
    return seeing.encoded


def parts_of(pictures: Pictures) -> list[list[Any]]:
    one, two = pictures.one, pictures.two
    return [[one, AFTER], [BEFORE, one, BETWEEN, two, AFTER], [BEFORE, two, AFTER], [BEFORE, AFTER]]


def check_texts(engine: Engine, pictures: Pictures, texts: Sequence[list[Any]], within: float = CLOSE) -> None:
    """All at once, and again from memory: tokens of the network's own forward."""
    cold = [one.result() for one in [asked(engine, pictures, *parts) for parts in texts]]
    for result, parts in zip(cold, texts, strict=True):
        assert pictures.lacks(result.token_ids, *parts) <= within
    warm = [one.result() for one in [asked(engine, pictures, *parts) for parts in texts]]
    assert [one.token_ids for one in warm] == [one.token_ids for one in cold]
    assert_at_rest(engine)


OF_TEXT = r".*language_model.*(q_proj|v_proj|down_proj)"
OF_SELF = r".*language_model.*self_attn\.(q_proj|v_proj)"  # not of layers that a text alone does not go through


@pytest.mark.parametrize("model_type", TYPES)
def test_adapters_change_texts_with_images_as_merged_weights_do(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures, selected = pictures_of(model_type), OF_SELF if model_type == "mllama" else OF_TEXT
    layers = layers_of(pictures.model, lambda name: re.fullmatch(selected, name) is not None)
    own = saved(tmp_path / "own", layers, target_modules=selected)
    other = Pictures(merged(pictures.model, own), pictures.one, pictures.two)
    texts = parts_of(pictures)
    with engine_of(pictures, tmp_path / "m", monkeypatch, adapters={"own": own}) as engine:
        for _ in range(2):
            plain = [asked(engine, pictures, *parts) for parts in texts]
            adapted = [asked(engine, pictures, *parts, adapter="own") for parts in texts]
            for parts, found, changed in zip(texts, plain, adapted, strict=True):
                assert pictures.lacks(found.result().token_ids, *parts) <= CLOSE
                assert other.lacks(changed.result().token_ids, *parts) <= CLOSE
        assert encoded(engine) == 2
        assert_at_rest(engine)


@pytest.mark.parametrize(
    ("model_type", "changed"),
    [("llava", r"model\.vision_tower"), ("mllama", r"model\.language_model\.layers\.1\.cross_attn")],
)
def test_an_adapter_that_changes_features_is_refused(
    model_type: str, changed: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures, selected = pictures_of(model_type), r".*(tower|language_model).*q_proj"
    layers = layers_of(pictures.model, lambda name: re.fullmatch(selected, name) is not None)
    own = saved(tmp_path / "own", layers, target_modules=selected)
    with engine_of(pictures, tmp_path / "m", monkeypatch) as engine:
        with pytest.raises(AdapterRefused, match=rf"changes {changed}.*target_modules"):
            engine.adapters.add("own", own)


@pytest.mark.parametrize("weights", ["int8", "int4", "mixed"])
@pytest.mark.parametrize("model_type", TYPES)
def test_quantised_weights(model_type: str, weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The network's own forward is that with these weights."""
    pictures = pictures_of(model_type)
    with engine_of(pictures, tmp_path, monkeypatch, weights=weights) as engine:
        guest = engine._built.guest
        assert guest.vision is not None, guest.not_seeing
        quantised = Pictures(guest.model, pictures.one, pictures.two)
        found = [asked(engine, pictures, *parts).result().token_ids for parts in parts_of(pictures)]
        check_texts(engine, pictures, parts_of(pictures), float("inf"))
        engine._built.loop.call(partial(check_own, guest, quantised, list(zip(parts_of(pictures), found, strict=True))))


def check_own(guest: Guest, pictures: Pictures, texts: list[tuple[list[Any], tuple[int, ...]]]) -> None:
    """By the own attention of a network that an engine has, on its thread."""
    own_attention(guest.model)
    try:
        for parts, found in texts:
            assert pictures.lacks(found, *parts) <= 1e-3
    finally:
        our_attention(guest.model)


@pytest.mark.parametrize("model_type", TYPES)
def test_bfloat16(model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = pictures_of(model_type, torch.bfloat16)
    with engine_of(pictures, tmp_path, monkeypatch) as engine:
        check_texts(engine, pictures, parts_of(pictures), within=0.1)


@pytest.mark.parametrize("model_type", [one for one in TYPES if one != "gemma3"])  # which has windows only
def test_little_memory_preempts_and_changes_no_text(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = pictures_of(model_type)
    texts = [[[20 + n] * (n + 20), pictures.one, AFTER, pictures.two, [n + 40] * 3] for n in range(5)]
    longest = max(len(pictures.ids(parts)) for parts in texts) + 70
    how: dict[str, Any] = {"step_tokens": longest, "context": longest, "max_sequences": 5, "record": "off"}
    how["cache_bytes"] = bytes_for(network_of(model_type), 2 * (longest - 70) + 20, **how) + 1
    with engine_of(pictures, tmp_path, monkeypatch, image_bytes=1, **how) as engine:
        several = [asked(engine, pictures, *parts, max_tokens=60) for parts in texts]
        for parts, one in zip(texts, several, strict=True):
            assert pictures.lacks(one.result().token_ids, *parts) <= CLOSE
        assert engine.stats().preemptions > 0
        assert_at_rest(engine)


def test_what_resumes_behind_an_image_has_its_features_from_the_store_or_encodes_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By cross-attention: of two images that each have another prompt, one is kept; and after a restart, none."""
    pictures = pictures_of("mllama")
    before = [20] * 300  # short texts are not stored
    texts = [[before, one, AFTER] for one in (pictures.one, pictures.two)]
    how: dict[str, Any] = {"image_bytes": 1, "store": str(tmp_path / "store")}
    with engine_of(pictures, tmp_path / "m", monkeypatch, **how) as engine:
        cold = [one.result().token_ids for one in [asked(engine, pictures, *parts) for parts in texts]]
        assert encoded(engine) == 2
        assert engine.stats().image_bytes == 0  # no completion sees them
        for parts, found in zip(texts, cold, strict=True):
            assert pictures.lacks(found, *parts) <= CLOSE
            assert asked(engine, pictures, *parts).result().token_ids == found
        assert encoded(engine) + engine.stats().images_restored == 4  # it may be written yet
        assert_at_rest(engine)
    with engine_of(pictures, tmp_path / "m", monkeypatch, **how) as engine:
        found = asked(engine, pictures, *texts[0], n=2).result()
        assert ids_of(found) == [cold[0]] * 2
        assert found.usage.cached_tokens > len(before)
        assert (encoded(engine), engine.stats().images_restored) == (0, 1)


def test_sampled_outputs_and_forks_behind_an_image_are_the_same_from_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More outputs than run at once, with penalties and without."""
    pictures = pictures_of("qwen3_vl")
    parts = [BEFORE, pictures.one, AFTER]
    with engine_of(pictures, tmp_path, monkeypatch, max_sequences=2) as engine:
        for how in ({}, {"repetition_penalty": 1.3, "frequency_penalty": 0.4}, {"no_repeat_ngram_size": 2}):
            engine.clear_cache()
            cold, warm = (
                ids_of(asked(engine, pictures, *parts, n=5, temperature=1.0, seed=7, max_tokens=9, **how).result())
                for _ in range(2)
            )
            assert cold == warm
            assert len(set(cold)) > 1
        assert_at_rest(engine)


@pytest.mark.parametrize("model_type", TYPES)
def test_steps_behind_images_run_as_a_recording(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = pictures_of(model_type)
    with engine_of(pictures, tmp_path, monkeypatch, record="auto") as engine:
        check_texts(engine, pictures, parts_of(pictures))
        assert engine.stats().recording.refused is None
        assert engine.stats().recording.steps > 4


def test_requests_that_are_cancelled_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At each third of the first turns, from when they wait to the middle of their texts."""
    pictures = pictures_of("qwen3_vl")
    parts = [BEFORE * 8, pictures.one, AFTER * 8, pictures.two, BEFORE]
    with engine_of(pictures, tmp_path, monkeypatch, step_tokens=16, max_sequences=3) as engine:
        built = engine._built
        seeing = built.loop.manager.seeing
        assert seeing is not None
        cold = asked(engine, pictures, *parts).result().token_ids
        turn, left = built.loop.turn, [0]

        def counted() -> Any:
            left[0] -= 1
            if not left[0]:
                for number in list(built.loop._requests):
                    built.loop.cancel(number)
            return turn()

        monkeypatch.setattr(built.loop, "turn", counted)
        seen = set[str | None]()
        for turns in range(1, 30, 3):
            engine.clear_cache()
            left[0] = turns
            several = [asked(engine, pictures, *parts, max_tokens=40) for _ in range(5)]
            seen |= {choice.finish_reason for one in several for choice in one.result().choices}
            built.loop.call(lambda: built.loop.check())
            assert not seeing._positions
            assert not built.intake.prompts.taken
        assert seen == {"cancelled", "length"}
        assert asked(engine, pictures, *parts).result().token_ids == cold
        assert_at_rest(engine)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("depth", [1, 4])
def test_texts_with_drafts_are_those_without(
    model_type: str, depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of which are right; several outputs, cold and from memory, greedy and sampled."""
    pictures = pictures_of(model_type)
    texts = parts_of(pictures)
    with engine_of(pictures, tmp_path, monkeypatch) as engine:
        for how in ({}, {"temperature": 0.8, "repetition_penalty": 1.2}):
            speculates(engine, None)
            options: dict[str, Any] = {"n": 2, "max_tokens": 12, "seed": 3, **how}
            plain = [ids_of(one.result()) for one in [asked(engine, pictures, *parts, **options) for parts in texts]]
            known = [
                [token for token in pictures.prompt(*parts) if not is_row(token)] + list(ids)
                for parts, several in zip(texts, plain, strict=True)
                for ids in several
            ]
            speculates(engine, oracle := Oracle(known), depth)
            for _ in range(2):
                engine.clear_cache()
                drafted = [one.result() for one in [asked(engine, pictures, *parts, **options) for parts in texts]]
                assert [ids_of(one) for one in drafted] == plain
                for one in drafted:
                    assert one.speculation is not None
                    assert one.speculation.accepted > 0
            assert sum(oracle.rounds) > 20
        assert_at_rest(engine)


class Reader(Silent):
    """Keeps what it gets of the hidden states of texts."""

    reads_hidden = True

    def __init__(self) -> None:
        self.read: dict[Key, list[int]] = {}
        self.states: dict[Key, list[torch.Tensor]] = {}

    def committed(self, news: Sequence[Committed]) -> None:
        for new in news:
            read = self.read.setdefault(new.key, [])
            assert new.start == len(read)
            read += new.tokens
            assert list(new.text[: len(read)]) == read[: len(new.text)]
            self.states.setdefault(new.key, []).append(new.hidden)


@pytest.mark.parametrize("step_tokens", [16, 512])
def test_what_reads_hidden_states_gets_those_of_tokens(
    step_tokens: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pictures = pictures_of("qwen3_vl")
    parts = [BEFORE, pictures.one, BETWEEN, pictures.two, AFTER]
    with engine_of(pictures, tmp_path, monkeypatch, step_tokens=step_tokens) as engine:
        speculates(engine, reader := Reader())
        drawn = asked(engine, pictures, *parts).result().token_ids
    prompt = pictures.prompt(*parts)
    (read,), (states,) = reader.read.values(), reader.states.values()
    assert read == [*(token for token in prompt if not is_row(token)), *drawn[:-1]]
    logits = pictures.model.lm_head(torch.cat(states)).float()
    own = pictures.logits(parts, *drawn[:-1])
    kept = [at for at, token in enumerate([*prompt, *drawn[:-1]]) if not is_row(token)]
    logits[:, PLACEHOLDER] = float("-inf")
    assert torch.allclose(logits, own[kept], atol=1e-3)


@pytest.mark.parametrize("draft", ["ngram", "model"])
@pytest.mark.parametrize("model_type", ["llava", "qwen3_vl"])
def test_drafters_draft_for_texts_with_images(
    draft: str, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A draft model gets the text without rows, as if there were no images."""
    pictures = pictures_of(model_type)
    one, two = pictures.one, pictures.two
    texts: list[list[Any]] = [[BEFORE * 3, one, BEFORE * 2], [AFTER, one, AFTER, two, AFTER, BEFORE], [one, [9] * 9]]
    if draft == "model":
        small = ARCHS["llama"].build(vocab_size=pictures.model.config.get_text_config().vocab_size)
        small.save_pretrained(tmp_path / "draft")
    with engine_of(pictures, tmp_path / "m", monkeypatch) as engine:
        plain = [asked(engine, pictures, *parts, n=2, max_tokens=16).result() for parts in texts]
    where = str(tmp_path / "draft") if draft == "model" else draft
    with engine_of(pictures, tmp_path / "m", monkeypatch, draft=where) as engine:
        speculator = engine._built.loop.manager.drafting.speculator
        assert speculator is not None
        speculates(engine, speculator.drafter)
        for _ in range(2):
            found = [one.result() for one in [asked(engine, pictures, *parts, n=2, max_tokens=16) for parts in texts]]
            assert list(map(ids_of, found)) == list(map(ids_of, plain))
            assert sum(one.speculation.drafted for one in found if one.speculation is not None) > 10
        engine.check()


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize(("step_tokens", "scored"), [(16, 128), (512, 128), (512, 2)])
def test_log_probabilities_of_a_prompt_are_those_of_the_own_forward(
    model_type: str, step_tokens: int, scored: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of images have none, so a step has all of an image, of however few rows it has the logits."""
    pictures = pictures_of(model_type)
    parts = [BEFORE, pictures.one, BETWEEN, pictures.two, AFTER]
    prompt, own = pictures.prompt(*parts), pictures.logits(parts)
    with engine_of(pictures, tmp_path, monkeypatch, step_tokens=max(step_tokens, pictures.one.rows)) as engine:
        engine._built.loop.scheduler._scored = engine._built.loop.scheduler._scored_beside = scored
        for _ in range(2):
            found = asked(engine, pictures, *parts, prompt_logprobs=2).result().prompt_logprobs
            assert found is not None
            assert [one is None for one in found] == [at == 0 or is_row(token) for at, token in enumerate(prompt)]
            for at, one in enumerate(found):
                if one is not None:
                    gap = float(own[at - 1, prompt[at]] - own[at - 1, one.top[0][0]])
                    assert one.logprob - one.top[0][1] == pytest.approx(gap, abs=CLOSE)
        assert_at_rest(engine)


@pytest.mark.parametrize("model_type", ["llava", "mllama"])
@pytest.mark.parametrize("how", ["alone", "beside others", "drafts"])
def test_a_text_that_is_shifted_behind_an_image_is_the_same(
    how: str, model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From memory, with others, and with drafts."""
    pictures = pictures_of(model_type)
    parts = [BEFORE, pictures.one, AFTER]
    context = len(pictures.ids(parts)) + 16
    shifting: dict[str, Any] = {"max_tokens": 40, "shift": True, "num_keep": -1}
    with engine_of(pictures, tmp_path, monkeypatch, context=context) as engine:
        cold = asked(engine, pictures, *parts, **shifting).result().token_ids
        assert engine.stats().shifts > 1
        if how == "drafts":
            speculates(engine, Oracle([[*BEFORE, *AFTER, *cold]]), 3)
        others = [asked(engine, pictures, [60 + n], pictures.one, AFTER) for n in range(4 * (how == "beside others"))]
        warm = asked(engine, pictures, *parts, **shifting).result()
        assert warm.token_ids == cold
        assert warm.usage.cached_tokens > pictures.one.rows
        if how == "drafts":
            assert warm.speculation is not None
            assert warm.speculation.accepted > 3
        for one in others:
            one.result()
        assert_at_rest(engine)
