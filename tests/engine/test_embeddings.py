"""Embeddings are the pooled hidden states of plain transformers, among other requests and with the prefix cache."""

import math

import pytest

from kvcellar import BadRequest, Engine, PromptTooLong
from kvcellar.engine.core.prompt_rows import PromptRows
from kvcellar.engine.models.weights.config_file import pooling_of
from kvcellar.errors import ScoresNotNumbers
from kvcellar.events import Pooling
from tests.engine.embedding_models import END, expected, saved, written
from tests.engine.mixes import assert_at_rest

TEXTS = ["the cat sat on the mat", "a dog", "the cat sat on a chair, which was warm, and slept until the morning came"]
SMALL = {"threads": 1, "cache_bytes": 20_000_000}


def near(found, wanted):
    return found == pytest.approx(wanted, abs=2e-4 * max(1.0, *map(abs, wanted)))


@pytest.mark.parametrize("name", ["llama", "gemma3", "lfm3"])
@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
@pytest.mark.parametrize("record", ["off", "auto"])
def test_they_are_those_of_transformers_in_any_chunks(tmp_path, name, mode, record):
    network = saved(tmp_path / "m", name, mode=mode)
    with Engine(tmp_path / "m", step_tokens=7, record=record, **SMALL) as engine:
        end = engine._codec.encode(END, special=False)
        for text, found in zip(TEXTS, engine.embeddings.of(TEXTS), strict=True):
            ids = engine.encode(text)
            assert ids[-1:] == end, "the end token was not appended"
            assert found.tokens == len(ids)
            assert math.hypot(*found.vector) == pytest.approx(1.0)
            assert near(found.vector, expected(network, ids, mode=mode))
        assert_at_rest(engine)


def test_they_share_steps_with_completions(tmp_path):
    network = saved(tmp_path / "m", mode="mean_tokens", normalised=False)
    with Engine(tmp_path / "m", step_tokens=8, **SMALL) as engine:
        alone = engine.generate(TEXTS[0], max_tokens=20, temperature=0.0, ignore_eos=True).token_ids
        engine.clear_cache()
        stream = engine.stream(TEXTS[0], max_tokens=20, temperature=0.0, ignore_eos=True)
        next(stream)
        found = engine.embeddings.of([TEXTS[2], [9, 8, 7]])
        for _ in stream:
            pass
        assert stream.result.token_ids == alone
        assert near(found[0].vector, expected(network, engine.encode(TEXTS[2]), mode="mean_tokens", normalised=False))
        assert near(found[1].vector, expected(network, [9, 8, 7], mode="mean_tokens", normalised=False))
        assert_at_rest(engine)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
def test_the_last_token_uses_the_cache_and_the_mean_does_not(tmp_path, name, mode):
    saved(tmp_path / "m", name, mode=mode)
    with Engine(tmp_path / "m", **SMALL) as engine:
        cold, warm = engine.embeddings.of([TEXTS[0]])[0], engine.embeddings.of([TEXTS[0]])[0]
        assert cold.cached == 0
        assert warm.cached == (warm.tokens - 1 if mode == "lasttoken" else 0)
        assert near(warm.vector, cold.vector)
        assert_at_rest(engine)


def test_a_directory_without_an_output_layer_embeds(tmp_path):
    network = saved(tmp_path / "m", headless=True)
    with Engine(tmp_path / "m", **SMALL) as engine:
        assert near(engine.embeddings.of(["a b"])[0].vector, expected(network, engine.encode("a b")))


def test_dimensions_are_cut_where_the_config_declares_them(tmp_path):
    saved(tmp_path / "m", matryoshka_dimensions=[8, 16])
    with Engine(tmp_path / "m", **SMALL) as engine:
        whole, cut = engine.embeddings.of(["a b"])[0], engine.embeddings.of(["a b"], dimensions=8)[0]
        scale = math.hypot(*whole.vector[:8])
        assert near(cut.vector, [value / scale for value in whole.vector[:8]])
        with pytest.raises(BadRequest, match=r"dimensions cannot be 9: it was trained for \[8, 16\]"):
            engine.embeddings.of(["a b"], dimensions=9)


def test_other_models_say_why_they_do_not_embed(tmp_path):
    with Engine(**SMALL) as engine:
        assert "modules.json" in engine.embeddings.refused
        with pytest.raises(BadRequest, match=r"model does not do embeddings: its directory has no modules\.json"):
            engine.embeddings.of(["a"])
    saved(tmp_path / "m")
    with Engine(tmp_path / "m", **SMALL) as engine:
        assert engine.embeddings.refused is None
        with pytest.raises(BadRequest, match="does not declare Matryoshka"):
            engine.embeddings.of(["a"], dimensions=4)
        with pytest.raises(BadRequest, match="a list of texts"):
            engine.embeddings.of("a")
        with pytest.raises(PromptTooLong):
            engine.embeddings.of(["a " * 400])
        ids = engine.embeddings.tokens("a " * 400, truncate=True)
        assert len(ids) == engine.model.context
        assert list(ids[-1:]) == engine.encode(END, special=False), "the end token was cut off"
        assert engine.embeddings.of([]) == []


MODULES = [
    {"type": "sentence_transformers.models.Transformer", "path": ""},
    {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"},
]


@pytest.mark.parametrize(
    ("modules", "pooling", "config", "reason"),
    [
        ([*MODULES, {"type": "sentence_transformers.models.Dense", "path": "2_Dense"}], {}, {}, "lists Dense"),
        (MODULES[:1], {}, {}, "no pooling"),
        ({}, {}, {}, "not a list"),
        ([{"type": "x.Pooling", "path": "../up"}], {}, {}, "no folder"),
        ([{"type": "x.Pooling", "path": "9_Pooling"}], {}, {}, "not there"),
        (MODULES, {"pooling_mode_cls_token": True}, {}, "by cls_token"),
        (MODULES, {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True}, {}, "lasttoken and mean_tokens"),
        (MODULES, {}, {}, "by nothing"),
        (MODULES, {"pooling_mode": "weightedmean"}, {}, "by weightedmean"),
        (MODULES, {"pooling_mode": "mean", "include_prompt": False}, {}, "leaves its prompt out"),
        (MODULES, {"pooling_mode": "mean"}, {"use_bidirectional_attention": True}, "later tokens"),
        (MODULES, {"pooling_mode": "mean"}, {"is_causal": False}, "later tokens"),
    ],
)
def test_what_is_not_computed_is_named(tmp_path, modules, pooling, config, reason):
    for file, value in (("modules.json", modules), ("1_Pooling/config.json", pooling), ("config.json", config)):
        written(tmp_path / file, value)
    assert reason in str(pooling_of(tmp_path))


def test_the_files_are_read_as_sentence_transformers_writes_them(tmp_path):
    written(tmp_path / "config.json", {"is_matryoshka": True})
    written(tmp_path / "1_Pooling/config.json", {"pooling_mode": "mean"})
    assert pooling_of(tmp_path) == Pooling("mean", normalised=False, sizes=None)
    written(tmp_path / "modules.json", [*MODULES, {"type": "sentence_transformers.models.Normalize"}])
    assert pooling_of(tmp_path) == Pooling("mean", normalised=True, sizes=None)


@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_an_embedding_that_is_no_numbers_fails_alone(tmp_path, monkeypatch, mode, value):
    """By an error that names it, which has the way out; one number of one row that is pooled is enough."""

    def damaged(self, logits, hidden):
        for completion, _, rows, _ in self._parts:
            if rows and len(completion.request.prompt) == len(long):
                hidden = hidden.clone()
                hidden[rows[-1], 3] = value
        return real(self, logits, hidden)

    saved(tmp_path / "m", mode=mode)
    real = PromptRows.values
    with Engine(tmp_path / "m", step_tokens=7, **SMALL) as engine:
        long, wanted = engine.encode(TEXTS[2]), engine.embeddings.of(TEXTS)
        monkeypatch.setattr(PromptRows, "values", damaged)
        for _ in range(2):
            with pytest.raises(ScoresNotNumbers, match="hidden states that were pooled hold NaN or infinity"):
                engine.embeddings.of(TEXTS)
        for found, one in zip(engine.embeddings.of(TEXTS[:2]), wanted, strict=False):
            assert near(found.vector, one.vector)
        monkeypatch.setattr(PromptRows, "values", real)
        assert near(engine.embeddings.of([TEXTS[2]])[0].vector, wanted[2].vector)
        assert_at_rest(engine)
